"""The parts of the documentation that are made from the code.

python -m scripts.docs             # write them into the pages
python -m scripts.docs --check     # say which pages are not up to date, and end with 1

A page keeps them between `<!-- generated: NAME -->` and `<!-- /generated -->`, so it can be read as
it is, also where nothing renders it.
"""
