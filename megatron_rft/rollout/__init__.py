"""From prompts to a batch of graded responses: sampler, scheduler, refiner, feedback. Knows no vLLM."""
