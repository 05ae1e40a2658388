"""Focus adapters in vLLM; entered by ``focus_hf_vllm``, vLLM's plugin."""
