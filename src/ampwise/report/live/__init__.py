"""Live view of a running training from another process: in the terminal, or on a page served to this machine only.

``wait_for_record`` finds the record, ``poller`` polls it, ``run_state`` is the run's state at a moment, ``sparkline``
and ``frame`` draw it, ``terminal`` shows it until the run has ended, and ``server`` serves it to a browser.
"""
