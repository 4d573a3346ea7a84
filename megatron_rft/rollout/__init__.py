"""Turns prompts into a batch of graded responses: sampler, refiner, feedback. Does not import vLLM."""
