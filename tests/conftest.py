"""How many random cases the tests draw.

By default a few, the same ones every time. `--hypothesis-profile=many` draws more, as CI does, and
`--hypothesis-profile=default` other ones every time.
"""

from hypothesis import settings

settings.register_profile("few", max_examples=12, deadline=None, derandomize=True)
settings.register_profile("many", settings.get_profile("few"), max_examples=60)
settings.load_profile("few")
