"""Many small cases in one test: as ``pytest.mark.parametrize``, which has a cost for each case that they have not.

All cases are gone through, and those that fail are named with the first error. ``parametrize`` is for cases that take
long, want a fixture of their own, or are left to the night.
"""

import functools
import inspect

import pytest

FAILURES = (Exception, pytest.fail.Exception)


def for_each(names, rows):
    """Call a test with each of the rows: a value, or a tuple of them where there are several names.

    >>> @for_each(("one", "other"), [(1, 1), (2, 3), (4, 5)])
    ... def test_both_are_the_same(one, other):
    ...     assert one == other
    >>> test_both_are_the_same()
    Traceback (most recent call last):
    AssertionError
    with 2 of 3 cases: one=2, other=3; one=4, other=5
    """
    rows = list(rows)
    assert not any(isinstance(row, type(pytest.param())) for row in rows), "`pytest.param` is for `parametrize`"
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases = [dict(zip(names, row if len(names) > 1 else (row,), strict=True)) for row in rows]
    assert cases, "without a case nothing is tested"

    def in_one_test(test):
        @functools.wraps(test)
        def go_through(**given):
            failed = []
            for case in cases:
                try:
                    test(**case, **given)
                except FAILURES as error:
                    failed.append((case, error))
            if failed:
                error = failed[0][1]
                error.add_note(
                    f"with {len(failed)} of {len(cases)} cases: {'; '.join(_shown(case) for case, _ in failed)}"
                )
                raise error

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in names]
        go_through.__signature__ = signature.replace(parameters=left)
        return go_through

    return in_one_test


def _shown(case):
    shown = ", ".join(f"{name}={getattr(value, '__name__', None) or repr(value)}" for name, value in case.items())
    return shown if len(shown) <= 300 else f"{shown[:300]}…"
