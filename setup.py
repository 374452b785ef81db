"""Only what pyproject.toml cannot say: a C loop that makes counting on a CPU fast, and may be absent.

Without a compiler the install goes on and the same counts are made with torch operations.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "ampwise.numbers.census._native",
            sources=["src/ampwise/numbers/census/_native.c"],
            extra_compile_args=["-O3"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
