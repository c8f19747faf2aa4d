"""Completions in several turns: when the policy's turn ends, the environment replies and sampling continues in the same slot.

The slot goes back to the turn's last token: what was decoded beyond it is discarded. A short reply is then forced: each of its
tokens is fed in a decode step like all others, in place of the sampled token. A long reply, such as the text that a tool has
found, is prefilled in one pass. Its tokens are in the context, their log-probs count as 0, and ``loss_mask`` is False on them.
Random numbers belong to positions, so it does not matter how often turns are checked.
"""

from __future__ import annotations

from oncurve.engines.native.sequence import Sequence
from oncurve.errors import DataError
from oncurve.models.chat_template import encode_reply
from oncurve.models.policy import Policy
from oncurve.records import Ints, StopReason
from oncurve.rng import philox_generator


def encode_next_reply(policy: Policy, sequence: Sequence, turn_ids: Ints, stop: StopReason, room: int) -> list[int] | None:
    """The tokens with which the environment answers the turn that has just ended, at most ``room`` of them; None if it is done.

    The turn's text and, if there is room, the reply are added to ``sequence.turns``.
    """
    prompt, ended = sequence.request.prompt, stop == "end"
    sequence.turns.append(policy.decode(turn_ids[: len(turn_ids) - ended]))
    reply = ask_environment(sequence)
    if reply is None:
        return None
    if room:
        sequence.turns.append(reply)
    return encode_reply(policy, prompt, reply, ended=ended)[:room]


def ask_environment(sequence: Sequence) -> str | None:
    """The environment's reply to the turns so far; None if there is no environment, or if it has nothing more to say."""
    prompt, key = sequence.request.prompt, sequence.request.key
    if prompt.environment is None:
        return None
    dice = philox_generator(key.seed, f"environment/{key.step}/{prompt.id}/{sequence.sample}", len(sequence.turns))
    try:
        return prompt.environment.reply(prompt, tuple(sequence.turns), dice)
    except Exception as error:  # an environment may be user code
        raise DataError(
            prompt.id,
            f"its environment failed: {type(error).__name__}: {error}",
            because="the completion can't continue without a reply",
            fix="fix the environment; to end the completion it returns None",
        ) from error
