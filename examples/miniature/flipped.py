"""The verifier's reward, inverted for one response in ten, chosen by a hash of the problem and the text."""

import zlib

from megatron_rft.responses import Prompt, Score
from megatron_rft.rewards.math import MathReward

VERIFIER = MathReward()
SHARE = 0.1


def flipped(prompt: Prompt, text: str) -> Score:
    (score,) = VERIFIER([prompt], [text])
    right = score.right
    noisy = zlib.crc32(f"{prompt.text}\0{text}".encode()) < SHARE * 2**32
    return Score(float(right != noisy), reason=score.reason, error=score.error, correct=right)
