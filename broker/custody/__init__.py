"""The books: which weight sets exist, who writes them, who leases them, where every byte is.

Pure: events in, actions out. No socket, no clock, no device, no zmq, no torch.

    states.py     the life cycle of a weight set as one table
    actions.py    what the server is told to do, as values
    records.py    what is on the books: sets, sessions, waiting requests, device budgets
    matching.py   does a resident set satisfy a demand?
    audit.py      the accounting invariant, and the books as `status` shows them

`Books` (books.py) takes the events. It is one object in layers, each in its file:

    ledger.py     the small steps that change the books; no event
    asking.py     `acquire`, and the requests that wait
    claiming.py   `claim` and `load`: weights that engines make
    writing.py    from `reserve` to `seal`, and writers that fail
    restoring.py  taking over from an earlier server
    books.py      sessions, giving back, evicting, pins, watches
"""

from broker.custody.books import Books
from broker.custody.records import Budget

__all__ = ["Books", "Budget"]
