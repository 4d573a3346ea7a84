"""Turns prompts into a batch of graded responses: sampler, scheduler, refiner, feedback. Does not import vLLM."""
