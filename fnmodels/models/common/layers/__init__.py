"""Layers that several families share: those of Granite, of OLMo 2, of Gemma 3n and 4, and with the delta rule."""
