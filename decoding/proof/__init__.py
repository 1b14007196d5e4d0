"""Proof by enumeration that the loop's text has plain sampling's distribution, its *law*.

judge.py         proves one drafter: begin here
enumeration.py   computes the law of the production loop, path by path
plain_law.py     computes the law of plain sampling, by recursion over texts
table_model.py   is the model of both, a table of probabilities

foreign.py       computes the law of code that does not know this project (docs/judge.md)
__main__.py      compares two such laws at the command line
"""
