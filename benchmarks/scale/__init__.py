"""The cost of every reduction, record and checkpoint as ranks grow to 16,384 and parameters to 1 T.

``counts`` has the laws, ``machine`` the numbers of what is simulated, ``simulation`` puts them together; ``ranks`` and
``check`` hold the laws against what gloo ranks of this machine exchange and write.
"""
