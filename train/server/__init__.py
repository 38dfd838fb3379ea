"""A server over HTTP: OpenAI's completions, from continuous batching; with --train, Tinker's protocol too.

command     the flags of `fnmodels-server`         app        routes, bounds, who may ask, metrics
worker      the thread that owns the models        scores     log-probabilities of prompts
body        fields of requests, with sentences     errors     errors in OpenAI's form
completions, chat   the two kinds of requests      answers    what is sent for them, streamed or at once
grammar     JSON schemas                           metrics    for Prometheus
"""
