"""The canary's verdict: the cheapest setting that is as good as text, else text, and asked no more than it must be."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping

import pytest
from resident_home import Home, Nobody

from connector.plan import PromptPlan
from deployments.canary import CORRECTED, FEW, LEAST_RIGHT, OWNER, PHRASINGS, QUESTIONS, SETTINGS, Canary
from deployments.messages import Verdict
from deployments.trial import Told, Trial
from sharding.errors import EngineFailed, Unavailable

EVERY = len(QUESTIONS)
WINDOW = 5
GOOD: Mapping[int | None, tuple[int, int]] = {None: (15, 12), 0: (15, 12)}
WORSE: Mapping[int | None, tuple[int, int]] = {None: (15, 12), **dict.fromkeys(SETTINGS, (24, 11))}


class Model(Trial):
    """Answers so many questions right about (few facts, all facts) from text (None) and with so many of them prefilled;
    its chunks are real."""

    def __init__(self, home: Home, right: Mapping[int | None, tuple[int, int]]) -> None:
        super().__init__(home.engine, home.template, home.embedder, home.encoder, home.tiers, priority=1)  # type: ignore[arg-type]
        self.right = right
        self.asked: Counter[tuple[int | None, int]] = Counter()
        self.follows = dict.fromkeys(PHRASINGS, 0)  # corrections, of so many
        self.corrected: Counter[str] = Counter()
        self.fails_with: Exception | None = None

    async def ask(self, plan: PromptPlan, max_tokens: int) -> Told:
        if self.fails_with is not None:
            raise self.fails_with
        prompt = "".join(map(chr, plan.token_ids))
        place = next(place for place, (begins, *_) in enumerate(QUESTIONS) if prompt.endswith(begins))
        begins, answer, _ = QUESTIONS[place]
        nearest = prompt.rpartition("- ")[2].partition("\n")[0]
        if (new := f"{begins} {CORRECTED[place]}.") in nearest:
            assert f"{begins} {answer}." not in prompt, "the old fact is not read"
            self.corrected[phrasing := nearest.replace(new, "{}")] += 1
            follows = self.corrected[phrasing] <= self.follows[phrasing]
            return Told(f" {CORRECTED[place] if follows else answer}", 0.1, len(prompt), plan.load_tokens, 0)
        setting = plan.kept - (len(plan.load) - 1) if plan.load else None
        self.asked[setting, plan.kept] += 1
        right = self.asked[setting, plan.kept] <= self.right[setting][plan.kept > FEW]
        return Told(f" {answer}. And so on" if right else " nonsense", 0.1, len(prompt), plan.load_tokens, 0)


class Notebook(Nobody):
    """Keeps verdicts; can be away."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.fails_with: Exception | None = None

    async def verdict(self, name: str) -> str | None:
        if self.fails_with is not None:
            raise self.fails_with
        return self.kept.get(name)

    async def keep_verdict(self, name: str, told: str) -> None:
        if self.fails_with is not None:
            raise self.fails_with
        self.kept[name] = told


@pytest.fixture
async def home() -> AsyncIterator[Home]:
    home = Home(budget=1_000_000)
    home.engine.max_model_len = 100_000
    trial = Trial(home.engine, home.template, home.embedder, home.encoder, home.tiers, priority=1)  # type: ignore[arg-type]
    await trial.encode_head()
    yield home
    home.encoder.close()
    home.ledger.check_integrity()
    assert not home.tiers.ids_of(OWNER), "the canary's chunks are gone"


def canary(model: Model, known: Nobody | None = None, fixed: int | None = None, window: int = WINDOW) -> Canary:
    return Canary(model, known or Nobody(), window_facts=window, fixed=fixed)


def test_every_question_is_asked_about_few_facts_and_about_all() -> None:
    assert len(QUESTIONS) > FEW
    assert len({question for *_, question in QUESTIONS}) == len(QUESTIONS)
    assert all(" " not in answer for _, answer, _ in QUESTIONS), "one word is compared"
    assert 0 < LEAST_RIGHT < EVERY / 2


def test_until_it_was_asked_memory_is_text(home: Home) -> None:
    verdict = canary(Model(home, {})).verdict
    assert (verdict.state, verdict.prefill_nearest) == ("pending", None)


async def test_injection_that_is_as_good_as_text_passes_and_nothing_dearer_is_tried(home: Home) -> None:
    model = Model(home, {None: (15, 12), 0: (15, 13)})
    verdict = await canary(model).prove()
    assert (verdict.state, verdict.prefill_nearest, verdict.text_facts) == ("passed", 0, 0)
    assert model.asked == {(setting, k): EVERY for setting in (None, 0) for k in (FEW, EVERY)}


async def test_the_phrasing_is_found_in_which_most_corrections_are_followed(home: Home) -> None:
    model = Model(home, GOOD)
    model.follows = {PHRASINGS[0]: 11, PHRASINGS[1]: 12, PHRASINGS[2]: 12, PHRASINGS[3]: 3}
    assert (await canary(model).prove()).phrasing == PHRASINGS[1], "the plainer of the two best"
    assert model.corrected == dict.fromkeys(PHRASINGS, EVERY)


def test_what_is_corrected_has_another_answer_then() -> None:
    assert len(CORRECTED) == EVERY
    assert all(new != answer for new, (_, answer, _) in zip(CORRECTED, QUESTIONS, strict=True))
    assert all(phrasing.count("{}") == 1 for phrasing in PHRASINGS)


async def test_where_few_facts_are_better_as_text_only_they_are(home: Home) -> None:
    verdict = await canary(Model(home, {None: (15, 12), 0: (14, 12)})).prove()
    assert (verdict.state, verdict.prefill_nearest, verdict.text_facts) == ("passed", 0, FEW)
    assert [verdict.prefilled(facts) for facts in (1, FEW, FEW + 1, 50)] == [1, FEW, 0, 0]


async def test_where_injection_alone_is_worse_the_least_that_has_to_be_prefilled_is_found(home: Home) -> None:
    first, second, *_ = SETTINGS
    model = Model(home, {None: (15, 12), first: (24, 11), second: (15, 12)})
    verdict = await canary(model).prove()
    assert (verdict.state, verdict.prefill_nearest, verdict.text_facts) == ("passed", second, 0)
    assert (first, FEW) not in model.asked


async def test_a_model_that_is_worse_with_every_setting_is_served_text_and_says_so(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    verdict = await canary(Model(home, WORSE)).prove()
    assert (verdict.state, verdict.prefill_nearest, verdict.prefilled(FEW)) == ("failed", None, None)
    assert f"of {EVERY} facts at best 11 right injected, 12 as text" in verdict.reason
    assert verdict.reason in caplog.text


async def test_a_model_that_knows_nothing_from_text_either_has_shown_nothing_and_is_served_text(home: Home) -> None:
    model = Model(home, {None: (LEAST_RIGHT - 1, 0)})
    verdict = await canary(model).prove()
    assert (verdict.state, verdict.prefill_nearest) == ("unjudged", None)
    assert model.asked == {(None, FEW): EVERY, (None, EVERY): EVERY}


async def test_a_model_whose_memory_is_refused_is_not_asked(home: Home) -> None:
    home.engine.refusal = "it has learned positions"
    model = Model(home, {})
    verdict = await canary(model).prove()
    assert (verdict.state, verdict.prefill_nearest, model.asked) == ("unjudged", None, {})
    assert "learned positions" in verdict.reason
    home.engine.refusal = None


async def test_facts_for_which_there_is_no_room_are_no_verdict(home: Home) -> None:
    home.ledger.budget_bytes = home.ledger.bytes + 10
    assert (await canary(Model(home, {})).prove()).state == "unjudged"


async def test_a_verdict_is_found_once_for_all_starts_with_the_same_model_and_window(home: Home) -> None:
    known = Notebook()
    found = await canary(Model(home, {None: (15, 12), 0: (15, 11), 3: (15, 12)}), known).prove(again=False)
    later = Model(home, GOOD)
    assert await canary(later, known).prove(again=False) == found
    assert not later.asked
    assert (await canary(later, known, window=WINDOW + 1).prove(again=False)).prefill_nearest == 0


async def test_on_demand_it_is_asked_again_and_the_new_verdict_is_kept(home: Home) -> None:
    known = Notebook()
    await canary(Model(home, WORSE), known).prove()
    better = await canary(Model(home, GOOD), known).prove(again=True)
    assert await canary(Model(home, {}), known).prove(again=False) == better


async def test_where_verdicts_are_kept_may_be_away(home: Home) -> None:
    known = Notebook()
    known.fails_with = Unavailable("Redis is away")
    assert (await canary(Model(home, GOOD), known).prove(again=False)).state == "passed"


async def test_what_the_operator_decided_stands_whatever_is_found_on_demand(home: Home) -> None:
    model = Model(home, WORSE)
    decided = canary(model, fixed=2)
    decided.begin()
    assert decided.verdict == Verdict("fixed", 2, decided.verdict.reason)
    found = await decided.prove()
    assert (found.state, found.prefill_nearest, found.text_facts) == ("fixed", 2, 0)
    assert "at best 11 right" in found.reason


async def test_a_start_goes_on_while_it_is_asked_and_an_engine_that_fails_leaves_text(home: Home) -> None:
    model = Model(home, GOOD)
    good = canary(model)
    good.begin()
    assert good.verdict.state == "pending"
    assert good._task is not None
    await good._task
    assert good.verdict.state == "passed"
    model.fails_with = EngineFailed("The engine of this shard has died.")
    bad = canary(model)
    bad.begin()
    assert bad._task is not None
    await bad._task
    assert (bad.verdict.state, bad.verdict.prefill_nearest) == ("pending", None)


async def test_a_shard_that_closes_stops_asking(home: Home) -> None:
    home.engine.gate.clear()
    closing = canary(Model(home, {}))
    closing.begin()
    closing.close()
    assert closing._task is not None
    home.engine.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await closing._task
