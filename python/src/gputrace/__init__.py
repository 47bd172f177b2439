"""gputrace for Python: limits on GPU memory in tests. See `gputrace.pytest_plugin`."""

__version__ = "0.1.0"
