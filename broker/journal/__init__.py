"""The journal: what a broker has lived through, kept beside its sockets, also when it has ended.

`<name>.journal` in the broker's directory, one JSON object a line as in `--log-format json`, and
`<name>.journal.old`, the one before. Readable by the broker's own user alone (mode 0600), together
never larger than `serve --journal-limit`.

    file.py       appending within the bound
    recording.py  which events are kept; keeper and server each write their own
    memory.py     what the devices' memory is used for, whenever that has changed
    reading.py    the lines of both files, whatever a crash has left of them

Server and keeper log through the same logger (logs.py), and the journal is one more handler of it.
A file that cannot be written is told once in the log and harms nothing else.
"""
