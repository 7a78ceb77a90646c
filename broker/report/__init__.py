"""The report: a broker's life as one page, from its journal.

    story.py   what the events say became of servers, weight sets, engines and memory
    telling.py how each event changes the story
    page.py    the story as rows, bars and sentences, within bounds
    page.html  the page: no script, no request to anywhere; styles in page.css

Reads the journal's files only: works while the broker runs and when it has ended.
"""
