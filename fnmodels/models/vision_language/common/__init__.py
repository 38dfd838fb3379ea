"""What vision-language models have in common: a text model of any family with a tower (`fnmodels.models.vision`)."""
