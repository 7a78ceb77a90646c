"""The books: which weight sets exist, who writes them, who leases them, where every byte is.

Pure: events in, actions out. No socket, no clock, no device, no zmq, no torch.

    states.py    the life cycle of a weight set as one table
    actions.py   what the server is told to do, as values
    records.py   what is on the books: sets, sessions, waiting requests, device budgets
    books.py     the events
    matching.py  does a resident set satisfy a demand?
"""

from broker.custody.books import Books
from broker.custody.records import Budget

__all__ = ["Books", "Budget"]
