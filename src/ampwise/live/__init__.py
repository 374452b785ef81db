"""A run while it runs, seen from another process: in the terminal, or on a page that this machine alone can reach.

``records`` finds the record, ``looking`` keeps what was seen of it, ``state`` is what there is to say at a moment,
``spark`` and ``frame`` draw that, ``terminal`` shows it until the run has ended, and ``server`` gives it to a browser.
"""
