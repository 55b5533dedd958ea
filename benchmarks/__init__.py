"""The measurements that the README quotes, runnable by anyone: `memshard bench --help`."""
