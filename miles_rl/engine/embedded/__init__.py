"""A small inference engine of our own: one process, one torch thread, SGLang's HTTP.

server.py -> generation.py -> protocol.py    HTTP in, validated requests, JSON out
core.py                                      the model thread: admits, steps, samples, updates weights
backend.py                                   what the core asks of a model
  qwen3_backend.py -> qwen3.py, attention.py, kv.py, prefix_cache.py       the fast path
  determinism.py -> row_counts.py                                        the same bits in every batch, or why not
  transformers_backend.py                                                any other causal LM
sampling.py                                  one token and its log-probability for each row of logits
engine.py                                    launches it as a replica
"""
