"""Parts of vision-language models: a text model of any family with a tower (`fnmodels.models.vision`)."""
