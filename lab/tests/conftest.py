"""Options and fixtures of the suite in tests/, for the lab's tests."""

pytest_plugins = ("tests.conftest",)
