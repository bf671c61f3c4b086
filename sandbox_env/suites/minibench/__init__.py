"""minibench: 89 small terminal tasks in Harbor format, generated from families with a seed. See `suite.py`."""
