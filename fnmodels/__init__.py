"""Models as pure functions of everything they depend on."""

from fnmodels import siblings

siblings.warn_shadowed(__file__, "params", "train")
