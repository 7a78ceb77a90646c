"""`serve --metrics ADDRESS:PORT`: the broker's numbers for Prometheus (docs/metrics.md).

    address.py   where to listen: the keeper binds, every server gets the same listening socket
    measures.py  what is counted while it happens: latencies, loads, causes of failures
    causes.py    the few words that a cause may be
    snapshot.py  everything that a page says, copied on the loop as plain data
    families.py  the page: names, types, help texts; alone in importing prometheus_client
    endpoint.py  connections, each in a thread of its own that never touches the books
    starting.py  what a server calls

Without `--metrics` a server imports neither snapshot.py, families.py nor endpoint.py.
"""
