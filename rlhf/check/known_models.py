"""Sizes of models that are often trained, as their config.json has them, so that a plan needs no download.

Read in stored copies of config.json:

    NVIDIA's package aiconfigurator-core 0.12.0, model_configs/   Qwen3 0.6B to 235B-A22B, Llama 3.1, Mixtral
    mlc-ai/mlc-llm 01ced33, python/mlc_llm/model/model_preset.py  Llama 3 and 3.2, Gemma 2 and 3 1B, Mistral, Phi-3, 3.5
                                                                  and 4 mini, SmolLM2, TinyLlama, Qwen2.5 3B, Qwen3 4B
    citsjtu2020/LLM-Prof 8434c8d, sglang/Model_Config.md          Qwen2.5 3B to 32B, Qwen3 4B to 32B, Llama 3.1 and 3.2
    mauer4/Attention-From-Scratch 381a295, weights/allenai/       OLMo 2 13B
    the hub itself                                                models that configs/ and docs/ name

Qwen2.5 72B, Math and Coder, Distill-Llama, OLMo 2 7B, Phi-4 and Gemma 3 4B to 27B come from the package litgpt 0.5.13,
config.py, which names the config.json of each; public logs and tests agree with it. DeepSeek-R1-Distill-Qwen and
SmolLM3 come from public logs, the context of Qwen3's base models from their cards.
"""

from __future__ import annotations

from typing import Any

KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "tie_word_embeddings", "max_position_embeddings",
)  # fmt: skip
D64, D128, D256 = ({"head_dim": size} for size in (64, 128, 256))  # where hidden / heads is something else, or said
A3B = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, **D128}
A22B = {**A3B, "moe_intermediate_size": 1536}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
LONGROPE = {"original_max_position_embeddings": 4096, "rope_scaling": {"rope_type": "longrope"}}

# names, separated by blanks (name@N: its context is N instead); the values of KEYS; and further keys
ROWS: tuple[tuple[str, tuple[str | int | bool, ...], dict[str, Any]], ...] = (
    ("Qwen/Qwen2.5-0.5B Qwen/Qwen2.5-0.5B-Instruct Qwen/Qwen2.5-Coder-0.5B Qwen/Qwen2.5-Coder-0.5B-Instruct",
     ("qwen2", 896, 4864, 24, 14, 2, 151936, True, 32768), {}),
    ("Qwen/Qwen2.5-1.5B@131072 Qwen/Qwen2.5-1.5B-Instruct Qwen/Qwen2.5-Coder-1.5B Qwen/Qwen2.5-Coder-1.5B-Instruct "
     "Qwen/Qwen2.5-Math-1.5B@4096 Qwen/Qwen2.5-Math-1.5B-Instruct@4096",
     ("qwen2", 1536, 8960, 28, 12, 2, 151936, True, 32768), {}),
    ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", ("qwen2", 1536, 8960, 28, 12, 2, 151936, False, 131072), {}),
    ("Qwen/Qwen2.5-3B Qwen/Qwen2.5-3B-Instruct Qwen/Qwen2.5-Coder-3B Qwen/Qwen2.5-Coder-3B-Instruct",
     ("qwen2", 2048, 11008, 36, 16, 2, 151936, True, 32768), {}),
    ("Qwen/Qwen2.5-7B@131072 deepseek-ai/DeepSeek-R1-Distill-Qwen-7B@131072 Qwen/Qwen2.5-7B-Instruct "
     "Qwen/Qwen2.5-Coder-7B Qwen/Qwen2.5-Coder-7B-Instruct Qwen/Qwen2.5-Math-7B@4096 "
     "Qwen/Qwen2.5-Math-7B-Instruct@4096",
     ("qwen2", 3584, 18944, 28, 28, 4, 152064, False, 32768), {}),
    ("Qwen/Qwen2.5-14B@131072 deepseek-ai/DeepSeek-R1-Distill-Qwen-14B@131072 Qwen/Qwen2.5-14B-Instruct "
     "Qwen/Qwen2.5-Coder-14B Qwen/Qwen2.5-Coder-14B-Instruct",
     ("qwen2", 5120, 13824, 48, 40, 8, 152064, False, 32768), {}),
    ("Qwen/Qwen2.5-32B@131072 Qwen/QwQ-32B@131072 Qwen/Qwen2.5-32B-Instruct Qwen/Qwen2.5-Coder-32B "
     "Qwen/Qwen2.5-Coder-32B-Instruct Qwen/QwQ-32B-Preview",
     ("qwen2", 5120, 27648, 64, 40, 8, 152064, False, 32768), {}),
    ("Qwen/Qwen2.5-72B@131072 Qwen/Qwen2.5-72B-Instruct@32768 Qwen/Qwen2.5-Math-72B Qwen/Qwen2.5-Math-72B-Instruct",
     ("qwen2", 8192, 29568, 80, 64, 8, 152064, False, 4096), {}),
    ("Qwen/Qwen3-0.6B Qwen/Qwen3-0.6B-Base@32768", ("qwen3", 1024, 3072, 28, 16, 8, 151936, True, 40960), D128),
    ("Qwen/Qwen3-1.7B Qwen/Qwen3-1.7B-Base@32768", ("qwen3", 2048, 6144, 28, 16, 8, 151936, True, 40960), D128),
    ("Qwen/Qwen3-4B@40960 Qwen/Qwen3-4B-Base@32768 Qwen/Qwen3-4B-Instruct-2507 Qwen/Qwen3-4B-Thinking-2507",
     ("qwen3", 2560, 9728, 36, 32, 8, 151936, True, 262144), D128),
    ("Qwen/Qwen3-8B Qwen/Qwen3-8B-Base@32768", ("qwen3", 4096, 12288, 36, 32, 8, 151936, False, 40960), D128),
    ("Qwen/Qwen3-14B Qwen/Qwen3-14B-Base@32768", ("qwen3", 5120, 17408, 40, 40, 8, 151936, False, 40960), D128),
    ("Qwen/Qwen3-32B", ("qwen3", 5120, 25600, 64, 64, 8, 151936, False, 40960), D128),
    ("Qwen/Qwen3-30B-A3B@40960 Qwen/Qwen3-30B-A3B-Base@32768 Qwen/Qwen3-30B-A3B-Instruct-2507 "
     "Qwen/Qwen3-30B-A3B-Thinking-2507",
     ("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, False, 262144), A3B),
    ("Qwen/Qwen3-235B-A22B@40960 Qwen/Qwen3-235B-A22B-Instruct-2507 Qwen/Qwen3-235B-A22B-Thinking-2507",
     ("qwen3_moe", 4096, 12288, 94, 64, 4, 151936, False, 262144), A22B),
    ("meta-llama/Meta-Llama-3-8B@8192 meta-llama/Meta-Llama-3-8B-Instruct@8192 meta-llama/Llama-3.1-8B "
     "meta-llama/Llama-3.1-8B-Instruct meta-llama/Meta-Llama-3.1-8B meta-llama/Meta-Llama-3.1-8B-Instruct "
     "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
     ("llama", 4096, 14336, 32, 32, 8, 128256, False, 131072), {}),
    ("allenai/Llama-3.1-Tulu-3-8B-DPO", ("llama", 4096, 14336, 32, 32, 8, 128264, False, 131072), {}),
    ("meta-llama/Llama-3.2-1B meta-llama/Llama-3.2-1B-Instruct",
     ("llama", 2048, 8192, 16, 32, 8, 128256, True, 131072), D64),
    ("meta-llama/Llama-3.2-3B meta-llama/Llama-3.2-3B-Instruct",
     ("llama", 3072, 8192, 28, 24, 8, 128256, True, 131072), D128),
    ("meta-llama/Meta-Llama-3-70B@8192 meta-llama/Meta-Llama-3-70B-Instruct@8192 meta-llama/Llama-3.1-70B "
     "meta-llama/Llama-3.1-70B-Instruct meta-llama/Meta-Llama-3.1-70B meta-llama/Meta-Llama-3.1-70B-Instruct "
     "meta-llama/Llama-3.3-70B-Instruct deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
     ("llama", 8192, 28672, 80, 64, 8, 128256, False, 131072), {}),
    ("meta-llama/Llama-3.1-405B meta-llama/Llama-3.1-405B-Instruct",
     ("llama", 16384, 53248, 126, 128, 8, 128256, False, 131072), {}),
    ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", ("llama", 2048, 5632, 22, 32, 4, 32000, False, 2048), {}),
    ("HuggingFaceTB/SmolLM2-135M HuggingFaceTB/SmolLM2-135M-Instruct",
     ("llama", 576, 1536, 30, 9, 3, 49152, True, 8192), {}),
    ("HuggingFaceTB/SmolLM2-360M HuggingFaceTB/SmolLM2-360M-Instruct",
     ("llama", 960, 2560, 32, 15, 5, 49152, True, 8192), {}),
    ("HuggingFaceTB/SmolLM2-1.7B HuggingFaceTB/SmolLM2-1.7B-Instruct",
     ("llama", 2048, 8192, 24, 32, 32, 49152, True, 8192), {}),
    ("HuggingFaceTB/SmolLM3-3B HuggingFaceTB/SmolLM3-3B-Base",
     ("smollm3", 2048, 11008, 36, 16, 4, 128256, True, 65536), {}),
    ("mistralai/Mistral-7B-v0.1 mistralai/Mistral-7B-Instruct-v0.1 mistralai/Mistral-7B-Instruct-v0.2",
     ("mistral", 4096, 14336, 32, 32, 8, 32000, False, 32768), {}),
    ("mistralai/Mistral-7B-v0.3 mistralai/Mistral-7B-Instruct-v0.3",
     ("mistral", 4096, 14336, 32, 32, 8, 32768, False, 32768), {}),
    ("mistralai/Mixtral-8x7B-v0.1 mistralai/Mixtral-8x7B-Instruct-v0.1",
     ("mixtral", 4096, 14336, 32, 32, 8, 32000, False, 32768), MIXTRAL),
    ("mistralai/Mixtral-8x22B-v0.1", ("mixtral", 6144, 16384, 56, 48, 8, 32000, False, 65536), MIXTRAL),
    ("google/gemma-2-2b google/gemma-2-2b-it", ("gemma2", 2304, 9216, 26, 8, 4, 256000, True, 8192), D256),
    ("google/gemma-2-9b google/gemma-2-9b-it", ("gemma2", 3584, 14336, 42, 16, 8, 256000, True, 8192), D256),
    ("google/gemma-2-27b google/gemma-2-27b-it", ("gemma2", 4608, 36864, 46, 32, 16, 256000, True, 8192), D128),
    ("google/gemma-3-1b-it google/gemma-3-1b-pt", ("gemma3_text", 1152, 6912, 26, 4, 1, 262144, True, 32768), D256),
    ("google/gemma-3-4b-it", ("gemma3_text", 2560, 10240, 34, 8, 4, 262208, True, 131072), D256),
    ("google/gemma-3-12b-it", ("gemma3_text", 3840, 15360, 48, 16, 8, 262208, True, 131072), D256),
    ("google/gemma-3-27b-it", ("gemma3_text", 5376, 21504, 62, 32, 16, 262208, True, 131072), D128),
    ("microsoft/Phi-3-mini-4k-instruct", ("phi3", 3072, 8192, 32, 32, 32, 32064, False, 4096), {}),
    ("microsoft/Phi-3.5-mini-instruct", ("phi3", 3072, 8192, 32, 32, 32, 32064, False, 131072), LONGROPE),
    ("microsoft/Phi-4-mini-instruct", ("phi3", 3072, 8192, 32, 24, 8, 200064, True, 131072), LONGROPE),
    ("microsoft/phi-4", ("phi3", 5120, 17920, 40, 40, 10, 100352, False, 16384), {}),
    ("allenai/OLMo-2-1124-7B allenai/OLMo-2-1124-7B-SFT allenai/OLMo-2-1124-7B-DPO allenai/OLMo-2-1124-7B-Instruct",
     ("olmo2", 4096, 11008, 32, 32, 32, 100352, False, 4096), {}),
    ("allenai/OLMo-2-1124-13B allenai/OLMo-2-1124-13B-SFT allenai/OLMo-2-1124-13B-DPO allenai/OLMo-2-1124-13B-Instruct",
     ("olmo2", 5120, 13824, 40, 40, 40, 100352, False, 4096), {}),
)  # fmt: skip


KNOWN_MODELS: dict[str, dict[str, Any]] = {
    name: dict(zip(KEYS, values, strict=True)) | more | ({"max_position_embeddings": int(context)} if context else {})
    for names, values, more in ROWS
    for name, _, context in (each.partition("@") for each in names.split())
}
