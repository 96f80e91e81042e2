"""The environment variables of an actor's process, which the libraries read when they are imported."""

from __future__ import annotations

from rlhf.config.program import TrainingProgramConfig
from rlhf.config.roles import ENGINE
from rlhf.weights.cpu_kernels import EQUAL_ROWS


def environment_of(role: str, config: TrainingProgramConfig, *, sockets: str | None) -> dict[str, str]:
    """The variables for an actor of a role.

    Args:
        sockets: the folder for vLLM's sockets; None: its own choice.
    """
    environment = {
        "VLLM_LOGGING_LEVEL": config.logging.level.upper(),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    if config.cluster.device == "cpu":
        environment |= {
            "DS_ACCELERATOR": "cpu",
            # Threads that spin at a barrier take the core that another process needs: on a busy machine an update
            # took ten times as long.
            "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": "",
        }
        if role == ENGINE:
            # vLLM compiles the ranks of log-probs, one sum, with inductor: 5 s of a start, 20 s without a cache.
            environment["TORCH_COMPILE_DISABLE"] = "1"
            # oneDNN keeps a kernel for each shape of a product, by default for 1,024: an engine grew by 700 MB.
            environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "64"
    if role == ENGINE and sockets:
        environment["VLLM_RPC_BASE_PATH"] = sockets
    if getattr(config.cluster, "placement", "") == "colocated":
        # vLLM's processes then receive pickled handles of GPU memory, which vLLM refuses by default.
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if config.run.deterministic and role == ENGINE:
        environment |= EQUAL_ROWS if config.cluster.device == "cpu" else {"VLLM_BATCH_INVARIANT": "1"}
    elif config.run.deterministic:
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch asks for it when its algorithms are deterministic
    return environment
