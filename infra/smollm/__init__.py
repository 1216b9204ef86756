"""SmolLM2-135M-Instruct as two policies of the preset `smollm`: a real language model that a laptop's CPU can train."""
