"""Proof by enumeration that the loop's text has plain sampling's distribution, its *law*.

loop_law.py      compares the law of the loop, with one drafter, to plain sampling's: begin here
enumeration.py   computes the law of any code that draws through a ``Randomness``, path by path
plain_law.py     computes the law of plain sampling, by recursion over texts
table_model.py   is the model of both, a table of probabilities

foreign.py       computes the law of code that does not know this project (docs/judge.md)
replaced.py      replaces the random functions that such code calls
noise.py         follows the random numbers of such code until they decide something
__main__.py      compares two such laws at the command line
"""
