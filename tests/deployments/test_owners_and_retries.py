"""Where requests go when shards die, owners change or Redis is away, seen from the client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from gateway_fakes import MODEL, Cluster, FakeShard

from deployments.memory_calls import AddCall
from deployments.messages import ChatCall, ChatFinished, ChatStarted, Sampling
from deployments.owner_calls import OwnerCalls
from deployments.owners import Owners
from sharding.directory import PlacementCache
from sharding.errors import DeadlineExceeded, EngineFailed, MemshardError, ShardGone, Unavailable
from sharding.ids import Placement, ShardId, UserId
from sharding.placement import PlacementPolicy

CHAT = "/v1/chat/completions"
ADA = UserId("ada")


def hello(user: str | None = "ada", stream: bool = False) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": stream}
    return body | ({"user_id": user} if user else {})


async def ask(client: httpx.AsyncClient, **how: Any) -> httpx.Response:
    return await client.post(CHAT, json=hello(**how))


async def owner_after_a_chat(client: httpx.AsyncClient, cluster: Cluster) -> FakeShard:
    if ADA not in cluster.directory.placements:
        cluster.place(ADA)
    assert (await ask(client)).status_code == 200
    return cluster.shards.of(ADA)


async def test_a_placed_user_costs_no_redis_round_trip(client: httpx.AsyncClient, cluster: Cluster) -> None:
    cluster.place(ADA)
    await ask(client)
    calls = cluster.directory.calls
    await ask(client)
    assert cluster.directory.calls == calls


async def test_the_directorys_owner_is_kept_while_it_is_alive(client: httpx.AsyncClient, cluster: Cluster) -> None:
    cluster.directory.placements[ADA] = Placement(ADA, ShardId("shard-b"), 7)
    assert (await owner_after_a_chat(client, cluster)).id == "shard-b"
    assert cluster.directory.placements[ADA].epoch == 7


@pytest.mark.parametrize("stream", [False, True])
async def test_a_user_whose_shard_is_gone_is_answered_by_another(
    client: httpx.AsyncClient, cluster: Cluster, stream: bool
) -> None:
    owner = await owner_after_a_chat(client, cluster)
    cluster.shards.kill(owner.id)
    assert (await ask(client, stream=stream)).status_code == 200
    assert cluster.shards.of(ADA) is cluster.other_than(owner)
    assert cluster.directory.placements[ADA].epoch == 2


async def test_a_shard_known_dead_is_left_before_its_heartbeat_runs_out(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    owner = await owner_after_a_chat(client, cluster)
    cluster.place("bob")
    cluster.shards.kill(owner.id, heartbeat_remains=True)
    assert [(await ask(client, user=user)).status_code for user in ("ada", "bob", "eve", None, None)] == [200] * 5
    assert {placement.shard for placement in cluster.directory.placements.values()} == {cluster.other_than(owner).id}


async def test_a_shard_that_only_cannot_be_reached_keeps_its_users(client: httpx.AsyncClient, cluster: Cluster) -> None:
    owner = await owner_after_a_chat(client, cluster)
    del cluster.shards.by_id[owner.id]  # unknown to the router, but its heart beats
    response = await ask(client)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert cluster.directory.placements[ADA] == Placement(ADA, owner.id, 1)


async def test_a_shard_first_not_reached_and_then_known_dead_is_left_too(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    owner = await owner_after_a_chat(client, cluster)
    owner.refuse_with = ShardGone("Not reached.", certain=False)
    owner.then = lambda: cluster.shards.kill(owner.id, heartbeat_remains=True)
    assert (await ask(client)).status_code == 200
    assert cluster.shards.of(ADA) is cluster.other_than(owner)


async def test_a_shard_that_leaves_keeps_its_streams_and_its_users_go_to_another(cluster: Cluster) -> None:
    first = cluster.place(ADA)
    owners = Owners(cluster.directory, PlacementPolicy(), PlacementCache(9), reports_ttl_s=0.05)
    assert await owners.placed(ADA) == Placement(ADA, first.id, 1)
    async with owners.watched(first.id):
        report = cluster.directory.reports[first.id]
        cluster.directory.reports[first.id] = report.model_copy(update={"ready": False, "leaving": True})
        await asyncio.sleep(0.2)  # as long as it is looked after
    await owners.live(newest=True)
    assert await owners.placed(ADA) == Placement(ADA, cluster.other_than(first).id, 2)


async def test_a_moved_user_is_followed_to_the_new_owner(client: httpx.AsyncClient, cluster: Cluster) -> None:
    old = await owner_after_a_chat(client, cluster)
    new = cluster.other_than(old)
    cluster.directory.placements[ADA] = Placement(ADA, new.id, 2)
    assert (await ask(client)).status_code == 200
    assert len(new.chats) == 1


async def test_a_shard_lost_in_the_middle_of_an_answer_is_an_error_and_not_a_second_answer(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    owner = await owner_after_a_chat(client, cluster)
    owner.break_with = ShardGone("Shard died.", certain=True)
    response = await ask(client, stream=True)
    assert response.text.count("You said: ") == 1
    assert '"code":"unavailable"' in response.text
    assert "[DONE]" not in response.text
    assert cluster.other_than(owner).chats == []
    assert (await ask(client)).status_code == 200, "the next request goes to another shard"


async def test_a_shard_lost_between_its_start_and_its_first_token_costs_a_retry_and_no_answer(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    owner = await owner_after_a_chat(client, cluster)
    owner.fail_with = ShardGone("Shard died.", certain=True)
    response = await ask(client, stream=True)
    assert response.text.count('"role":"assistant"') == 1
    assert response.text.count("You said: ") == 1
    assert response.text.endswith("data: [DONE]\n\n")
    assert len(cluster.other_than(owner).chats) == 1


async def test_placed_users_and_strangers_are_served_while_redis_is_away(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    cluster.place(ADA)
    await ask(client)
    cluster.directory.away = True
    assert (await ask(client)).status_code == 200
    assert (await ask(client, user=None)).status_code == 200
    refused = await ask(client, user="bob")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    cluster.directory.away = False
    assert (await ask(client, user="bob")).status_code == 200


async def test_without_a_ready_shard_nobody_is_answered(client: httpx.AsyncClient, cluster: Cluster) -> None:
    cluster.directory.reports.clear()
    for user in ("ada", None):
        assert (await ask(client, user=user)).status_code == 503


async def test_a_shard_newer_than_the_cached_reports_is_not_taken_for_dead(cluster: Cluster) -> None:
    owners = cluster.gateway.owners
    await owners.live()
    cluster.shards.start("shard-new")
    cluster.directory.placements[ADA] = Placement(ADA, ShardId("shard-new"), 3)
    assert await owners.owner(ADA) == Placement(ADA, ShardId("shard-new"), 3)


async def test_reports_are_read_once_per_second_and_so_are_failures(cluster: Cluster) -> None:
    now = 100.0
    owners = Owners(cluster.directory, PlacementPolicy(), PlacementCache(10), reports_ttl_s=1.0, clock=lambda: now)
    for _ in range(3):
        await owners.live()
    assert cluster.directory.calls == 1
    cluster.directory.away = True
    now += 1.5
    for _ in range(3):
        with pytest.raises(Unavailable):
            await owners.live()
    assert cluster.directory.calls == 2
    assert await owners.any_shard(None) in cluster.shards.by_id, "the shards that were named last"


async def test_the_deadline_covers_the_retry(cluster: Cluster) -> None:
    calls = OwnerCalls(cluster.shards, cluster.gateway.owners, deadline_s=0.0)
    with pytest.raises(DeadlineExceeded):
        await calls.add(ADA, lambda p, left_s: cluster.shards.ask(p.shard, AddCall("r", p, ("x",)), left_s))


# -- what a lost answer was ------------------------------------------------------------------------------------------


async def stored(client: httpx.AsyncClient, cluster: Cluster) -> tuple[str, FakeShard]:
    """The path of a fact of Ada's, and the shard that owns her."""
    body = {"user_id": ADA, "messages": "I like tea."}
    [fact] = (await client.post("/v1/memories", json=body)).json()["results"]
    return f"/v1/memories/{fact['id']}?user_id=ada", cluster.shards.of(ADA)


async def test_a_deletion_whose_answer_was_lost_is_done_when_it_is_repeated(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    fact, owner = await stored(client, cluster)
    owner.refuse_with = ShardGone("Died after it deleted.", certain=False)
    owner.then = lambda: cluster.shards.kill(owner.id)
    assert (await client.delete(fact)).status_code == 200
    assert (await client.delete(fact)).status_code == 404


async def test_a_deletion_that_only_went_to_the_wrong_shard_finds_nothing_where_nothing_is(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    await stored(client, cluster)
    await client.get("/v1/memories?user_id=ada")
    cluster.directory.placements[ADA] = Placement(ADA, ShardId("shard-b"), 2)
    assert (await client.delete("/v1/memories/none?user_id=ada")).status_code == 404


def watchful(cluster: Cluster) -> OwnerCalls:
    """The calls of a gateway that reads heartbeats a hundred times as often."""
    owners = Owners(cluster.directory, PlacementPolicy(), PlacementCache(10), reports_ttl_s=0.01)
    return OwnerCalls(cluster.shards, owners, deadline_s=20.0)


def question() -> ChatCall:
    return ChatCall("r", None, ({"role": "user", "content": "hello"},), Sampling())


async def test_a_shard_that_hangs_is_left_when_its_heartbeat_has_run_out(cluster: Cluster) -> None:
    calls, hung = watchful(cluster), cluster.place(ADA)
    hung.stall_before_start = True
    chat = asyncio.create_task(calls.whole_chat(ADA, question()))
    await asyncio.sleep(0.1)
    assert not chat.done(), "it has a heartbeat: it may just be slow"
    del cluster.directory.reports[hung.id]
    events = await chat
    assert isinstance(events[-1], ChatFinished)
    assert cluster.shards.of(ADA) is cluster.other_than(hung)
    assert hung.aborted.is_set()


async def test_while_redis_is_away_nobody_is_taken_for_dead(cluster: Cluster) -> None:
    calls, slow = watchful(cluster), cluster.place(ADA)
    await calls.whole_chat(ADA, question())
    slow.stall_before_start = True
    chat = asyncio.create_task(calls.whole_chat(ADA, question()))
    await asyncio.sleep(0.05)
    cluster.directory.away = True
    await asyncio.sleep(0.1)
    assert not chat.done()
    chat.cancel()


async def test_a_cached_owner_without_a_heartbeat_is_left_although_it_answers(cluster: Cluster) -> None:
    calls, cut_off = watchful(cluster), cluster.place(ADA)
    await calls.whole_chat(ADA, question())
    del cluster.directory.reports[cut_off.id]
    await asyncio.sleep(0.02)
    for _ in range(2):  # the first has the heartbeats read, beside itself
        await calls.whole_chat(ADA, question())
        await asyncio.sleep(0.01)
    assert cluster.shards.of(ADA) is cluster.other_than(cut_off)


@pytest.mark.parametrize("away", [False, True])
async def test_a_shard_that_cannot_ask_redis_serves_only_where_the_gateway_cannot_either(
    cluster: Cluster, away: bool
) -> None:
    calls, doubtful = watchful(cluster), cluster.place(ADA)
    await calls.whole_chat(ADA, question())
    cluster.directory.away = away
    del cluster.directory.reports[doubtful.id]
    doubtful.refuse_with = Unavailable("Redis is away.", unconfirmed=True)
    doubtful.then = lambda: setattr(doubtful, "refuse_with", None)
    await calls.whole_chat(ADA, question())
    served = doubtful if away else cluster.other_than(doubtful)
    assert cluster.shards.of(ADA) is served
    placement = served.chats[-1].placement
    assert placement is not None
    assert placement.redis_away == away


async def test_a_whole_answer_survives_a_shard_that_is_lost_on_the_way(cluster: Cluster) -> None:
    calls, lost = watchful(cluster), cluster.place(ADA)
    lost.break_with = ShardGone("It died.", certain=True)
    events = await calls.whole_chat(ADA, question())
    assert [type(event) for event in events].count(ChatStarted) == 1
    assert isinstance(events[-1], ChatFinished)


async def test_a_shard_that_cannot_be_reached_is_tried_again_until_its_heartbeat_has_run_out(cluster: Cluster) -> None:
    calls, crashed = watchful(cluster), cluster.place(ADA)
    await calls.whole_chat(ADA, question())
    del cluster.shards.by_id[crashed.id]  # nobody knows yet that its node is dead
    chat = asyncio.create_task(calls.whole_chat(ADA, question()))
    await asyncio.sleep(0.6)
    assert not chat.done()
    assert cluster.directory.placements[ADA].shard == crashed.id, "it may still live"
    del cluster.directory.reports[crashed.id]
    assert isinstance((await chat)[-1], ChatFinished)
    assert cluster.shards.of(ADA).id != crashed.id


# -- deletions --------------------------------------------------------------------------------------------------------


async def told_on_two_shards(client: httpx.AsyncClient, cluster: Cluster) -> tuple[FakeShard, FakeShard]:
    """The shard that owns ada, and the one that did before."""
    body = {"user_id": ADA, "messages": [{"role": "user", "content": "I row."}], "infer": False}
    assert (await client.post("/v1/memories", json=body)).is_success
    before = cluster.shards.of(ADA)
    now = cluster.other_than(before)
    assert (await client.post("/v1/admin/moves", json={"user_id": ADA, "shard": now.id})).is_success
    return now, before


async def test_who_never_moved_is_deleted_without_asking_another_shard(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    body = {"user_id": ADA, "messages": [{"role": "user", "content": "I row."}], "infer": False}
    assert (await client.post("/v1/memories", json=body)).is_success
    assert (await client.delete("/v1/memories?user_id=ada")).json()["deleted"] == 1
    assert cluster.shards.left == []


async def test_before_a_deletion_every_other_shard_lets_go_of_the_user(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    now, before = await told_on_two_shards(client, cluster)
    (id,) = now.facts[ADA]
    assert (await client.delete(f"/v1/memories/{id}/")).is_success
    assert (await client.delete("/v1/memories?user_id=ada")).is_success
    assert cluster.shards.left == [(before.id, ADA)] * 2


@pytest.mark.parametrize("error", [ShardGone("Away.", certain=False), EngineFailed("Its engine has died.")])
async def test_a_deletion_is_refused_while_a_shard_that_lives_does_not_let_go(
    client: httpx.AsyncClient, cluster: Cluster, error: MemshardError
) -> None:
    now, before = await told_on_two_shards(client, cluster)
    before.refuse_with = error
    assert (await client.delete("/v1/memories?user_id=ada")).status_code == 503
    assert len(now.facts[ADA]) == 1, "nothing was deleted that is said not to be"
    before.refuse_with = None
    assert (await client.delete("/v1/memories?user_id=ada")).json()["deleted"] == 1


async def test_a_deletion_waits_for_a_shard_that_cannot_be_reached_until_its_heartbeat_has_run_out(
    cluster: Cluster,
) -> None:
    calls, now = watchful(cluster), cluster.place(ADA)
    before = cluster.other_than(now)
    cluster.directory.placements[ADA] = Placement(ADA, now.id, 2)
    before.refuse_with = ShardGone("Away.", certain=False)
    sent: list[ShardId] = []

    async def hop(placement: Placement, left_s: float) -> None:
        sent.append(placement.shard)

    deletion = asyncio.create_task(calls.delete(ADA, calls.forgetting(hop)))
    await asyncio.sleep(0.1)
    assert sent == []
    del cluster.directory.reports[before.id]
    await deletion
    assert sent == [now.id]


async def test_a_deletion_does_not_wait_for_a_shard_that_is_gone(client: httpx.AsyncClient, cluster: Cluster) -> None:
    now, before = await told_on_two_shards(client, cluster)
    cluster.shards.kill(before.id)
    assert (await client.delete("/v1/memories?user_id=ada")).json()["deleted"] == 1
    assert not now.facts[ADA]


async def test_who_has_facts_and_no_placement_gets_a_shard_with_any_request(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    """As where another model is served than before."""
    cluster.directory.remembered.add(ADA)
    assert (await client.get("/v1/memories?user_id=bob")).status_code == 404
    assert (await client.delete("/v1/memories?user_id=ada")).status_code == 200
    assert cluster.directory.placements[ADA].epoch == 1
