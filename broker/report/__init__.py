"""The report: a broker's life as one page, from its journal.

    story.py    what became of servers, weight sets, engines and memory
    telling.py  how each event of the journal changes the story
    axis.py     where moments lie on the page
    rows.py     servers, weight sets and engines as rows of bars
    memory.py   a device's memory as areas
    page.py     the whole page, within bounds, from page.html and page.css: no script, no request

Reads the journal's files only: works while the broker runs and when it has ended.
"""
