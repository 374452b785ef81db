"""Live view of a running training from another process: in the terminal, or on a page served to this machine only.

``poller`` finds the record and polls it, ``run_state`` is the run's state at a moment, ``frame`` draws it, ``terminal``
shows it until the run has ended, and ``server`` serves it to a browser.
"""
