"""Short step of a decoder on a CPU, as one compiled function.

The way from a call of the model to one dot product leads through five files. ``decoder`` lays the
rows of its calls end to end (``Batch``), gives the weights under a plan by address (``Weights``),
and calls ``step``. ``step.run_step`` reads like the readable blocks; its ``project`` stands for
``nn.Linear``: ``team`` writes its arguments on a board, and runs two tasks on all threads. Those
are in ``tasks``: one rounds the inputs, the other takes the matrix block by block and calls ``dot``
for each. ``dot`` has the loop over the columns, instruction by instruction, and a drawing of how
low-bit weights lie in memory.

Beside the way: ``elements`` has the norms and functions of single numbers, ``kernels`` the
compiling and keeping of code and the operators in which ``dot`` is written. ``rounding`` makes the
low-bit weights.
"""
