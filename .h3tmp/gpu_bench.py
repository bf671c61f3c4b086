import sys
import time
import random

sys.path.insert(0, ".")
from miles_rl.engine.embedded.core import EngineCore
from miles_rl.engine.embedded.qwen3_backend import Qwen3Backend
from miles_rl.engine.embedded.random_model import write_random_qwen3
from miles_rl.engine.embedded.request import Request, SamplingParams

p = write_random_qwen3(
    "/tmp/m06",
    scale=0.02,
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
)
core = EngineCore(Qwen3Backend(p, device="cuda", dtype="bfloat16", running_kv_gib=40, prefix_cache_gib=8))
r = random.Random(0)
for B in (1, 16, 64, 128):
    for rep in range(2):
        core.backend.clear_cache()
        core.waiting.extend(
            Request("x", [r.randrange(2, 150000) for _ in range(300)], SamplingParams(max_new_tokens=100))
            for _ in range(B)
        )
        t = time.time()
        n = 0
        while core.step():
            n += 1
        d = time.time() - t
    print(
        "0.6B bf16 H200 batch", B, "tok/s", round(B * 100 / d), "steps", n, "ms/step", round(d / n * 1e3, 2), flush=True
    )
