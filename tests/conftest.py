"""Settings of every test: property tests draw the same examples on each run, and no deadline, for compilers warm up."""

import hypothesis

hypothesis.settings.register_profile("fnmodels", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fnmodels")
