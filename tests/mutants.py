"""Defects of public speculative-decoding code, each as a mutant of this project's code, with the
test that kills it.

A mutant is a textual change to one production function. ``python -m tests.mutants`` prints the
table.
"""

import functools
import inspect
import io
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

import generate
import tests.conftest  # noqa: F401  examples without shrinking, as in the tests
from decoding import (
    drafters,
    grammar,
    policies,
    race,
    randomness,
    rounds,
    sampling,
    speculate,
    text,
    verify,
)
from decoding.proof import enumeration, foreign, loop_law, table_model
from decoding.proof.plain_law import Request, plain_law
from model.cache import KVCache
from model.fast.cpu import FastDecoder
from tests.app import test_compare
from tests.decoding import (
    test_drafters,
    test_grammar,
    test_race,
    test_speculate,
    test_text,
)
from tests.laws import EXACT, random_tables
from tests.model import test_step


@dataclass(frozen=True)
class Mutant:
    """``row`` of the defect catalogue; ``old`` -> ``new`` in the source of ``function`` of
    ``owner``.
    """

    row: int
    defect: str
    owner: Any
    function: str
    old: str
    new: str
    killer: Callable[[], None]


def function_of(found: Any) -> Any:
    """The function itself of a property, or of a function with decorators."""
    return inspect.unwrap(found.fget if isinstance(found, property) else found)


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Within, the function has the mutant's code, wherever it is called. The mutant's ``old`` must
    occur exactly once, so that it changes something.
    """
    function = function_of(getattr(mutant.owner, mutant.function))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutant.old) == 1, f"{mutant.function} no longer holds {mutant.old!r}"
    source = source.replace(mutant.old, mutant.new)
    made: dict[str, Any] = {}
    exec(compile(source, f"<mutant {mutant.row}>", "exec"), function.__globals__, made)
    original = function.__code__
    function.__code__ = function_of(made[function.__name__]).__code__
    try:
        yield
    finally:
        function.__code__ = original


TABLE = random_tables(4, 4, 3)
TIED = table_model.TableModel(  # the two best tokens of each row are as likely
    *torch.tensor([0.4, 0.2, 0.4], dtype=torch.float64).expand(2, 4, 3)
)


def law(
    request: Request,
    setup: loop_law.Setup | None = None,
    *,
    model: table_model.TableModel = TABLE,
    rule: str = "ratio",
) -> Callable[[], None]:
    """A killer: the production loop's enumerated law equals plain sampling's."""

    def the_enumerated_law_equals_plain_samplings() -> None:
        assert loop_law.bias(model, request, setup or loop_law.Setup(), rule) < EXACT

    return the_enumerated_law_equals_plain_samplings


ONE_BYTE = "one byte forced, its token not"


def under(name: str, setup: loop_law.Setup | None = None) -> Callable[[], None]:
    """A killer: the law of texts under a grammar, which begins without masks. The plain law knows
    the language alone.
    """

    def the_enumerated_law_equals_plain_samplings() -> None:
        request = test_grammar.request(name)
        known = replace(request, constraints=(test_grammar.of_language(name),))
        with mock.patch.object(loop_law, "plain_law", lambda model, _: plain_law(model, known)):
            law(request, setup, model=test_grammar.table(name))()

    return the_enumerated_law_equals_plain_samplings


def of(test: Callable[..., None], *values: Any) -> Callable[[], None]:
    """A killer: a test that takes values, such as a model family."""
    return functools.update_wrapper(functools.partial(test, *values), test)


def kills(mutant: Mutant) -> bool:
    """Whether the mutant's killer passes without it and fails with it. Tests of the suite pass
    there.
    """
    if not mutant.killer.__name__.startswith("test_"):
        mutant.killer()
    nonsense = io.StringIO()  # of broken decoders
    with applied(mutant), redirect_stdout(nonsense), redirect_stderr(nonsense):
        try:
            mutant.killer()
        except (AssertionError, ValueError, ZeroDivisionError):
            return True
    return False


def judged(mutant: Mutant) -> float | None:
    """Distance to plain sampling's law that the judge of foreign code finds for the loop with the
    mutant and with its production randomness, on the request of the mutant's proof; None where
    another test kills it.
    """
    if mutant.killer.__name__.startswith("test_") and mutant.row not in RANDOM_NUMBERS:
        return None
    distances = [0.0]

    def found_by_judge(
        model: table_model.TableModel,
        request: Request,
        setup: loop_law.Setup,
        rule: str = "ratio",
    ) -> float:
        found = foreign.law_of(
            lambda: loop_law.run_loop(
                model, request, setup, randomness.SeededRandomness(0), rule=rule
            )
        )
        distances.append(
            enumeration.total_variation(found.probs, loop_law.plain_law(model, request))
        )
        return distances[-1]

    with applied(mutant), mock.patch.object(loop_law, "bias", found_by_judge):
        try:
            if mutant.row in RANDOM_NUMBERS:
                found_by_judge(TABLE, LONG, loop_law.Setup())
            else:
                mutant.killer()
        except AssertionError:  # also of a loop that writes too many tokens
            return distances[-1] or 1.0
    return distances[-1]


SAMPLED = Request()
FILTERED = Request(params=sampling.SamplingParams(0.7, top_k=2))
ENDING = Request(max_new_tokens=3, eos_ids=frozenset({1}))
LONG = Request(max_new_tokens=3)
ADAPTIVE = loop_law.Setup(policy=lambda: policies.AdaptiveExit(0.45, 2))
RANDOM_NUMBERS = (5, 8, 32)  # mutants of ``SeededRandomness``
SELF_DRAFT = test_drafters.test_a_self_draft_reads_the_targets_entries_at_the_right_positions

MUTANTS = [
    Mutant(
        1,
        "a rejection samples p instead of the residual",
        verify,
        "verify_by_ratio",
        "(p - q).clamp(min=0)",
        "p",
        law(SAMPLED),
    ),
    Mutant(
        2,
        "a greedy draft is verified as if it were sampled",
        drafters.ModelDrafter,
        "propose",
        "randomness.draw(probs[0], text.place(count))[None]",
        "probs[0].argmax()[None]",
        law(SAMPLED),
    ),
    Mutant(
        3,
        "the bonus token comes from unprocessed logits",
        speculate,
        "speculate",
        "distribution(logits, context, params, text.allowed(draft.tokens))",
        "distribution(logits, context, params, text.allowed(draft.tokens))\n"
        "        if len(logits) > 1:\n"
        "            probs[-1:] = distribution(logits[-1:], context, SamplingParams(1.0))",
        law(FILTERED),
    ),
    Mutant(
        4,
        "slots of a short draft are padded and verified as token 0",
        drafters.ModelDrafter,
        "propose",
        "return Draft(torch.cat(tokens), torch.cat(rows))",
        "for _ in range(limit + 1 - len(tokens)):\n"
        "        tokens.append(context[:1] * 0)\n"
        "        rows.append(probs)\n"
        "    return Draft(torch.cat(tokens), torch.cat(rows))",
        law(LONG, ADAPTIVE),
    ),
    Mutant(
        5,
        "acceptance lets u = 0 accept probability 0",
        randomness.SeededRandomness,
        "accept",
        "< probabilities",
        "<= probabilities",
        test_race.test_u_zero_accepts_nothing_impossible,
    ),
    Mutant(
        6,
        "an epsilon in the residual",
        verify,
        "verify_by_ratio",
        ".clamp(min=0)",
        ".clamp(min=0) + 1e-6",
        law(FILTERED),
    ),
    Mutant(
        7,
        "temperature 0 is a division by 1e-10",
        speculate,
        "speculate",
        "context, params, text.allowed",
        "context, SamplingParams(1e-10), text.allowed",
        law(Request(params=sampling.SamplingParams(0.0)), model=TIED),
    ),
    Mutant(
        8,
        "one random number serves every acceptance",
        randomness.SeededRandomness,
        "accept",
        "self.uniform(len(probabilities))",
        "self.uniform(1)",
        test_race.test_tosses_are_independent_within_a_call_and_between_calls,
    ),
    Mutant(
        9,
        "a sampled acceptance with a greedy bonus token",
        verify,
        "verify_by_ratio",
        "p = target_probs.index_select(0, accepted[None])[0]",
        "p = target_probs.index_select(0, accepted[None])[0]\n"
        "    p = (p == p.max()).to(p.dtype) if accepted == len(drafted) else p",
        law(SAMPLED),
    ),
    Mutant(
        10,
        "the repetition penalty sees the same prefix at every drafted position",
        sampling,
        "penalised",
        "rows[:, None] +",
        "0 * rows[:, None] +",
        law(Request(params=sampling.SamplingParams(1.0, repetition_penalty=1.5))),
    ),
    Mutant(
        11,
        "an end-of-text token inside an accepted draft is ignored",
        text.Text,
        "extend",
        "self._check_end()",
        "len(emitted) < len(tokens) or self._check_end()",
        law(ENDING),
    ),
    Mutant(
        12,
        "tokens after the end of the text are returned and counted",
        text.Text,
        "extend",
        "if self.finish:\n",
        "if False:\n",
        law(ENDING),
    ),
    Mutant(
        13,
        "of several end-of-text ids only the first in the list ends the text",
        text.Text,
        "_check_end",
        "in self.conditions.eos_ids",
        "in sorted(self.conditions.eos_ids)[:1]",
        law(Request(eos_ids=frozenset({0, 2}))),
    ),
    Mutant(
        14,
        "a stop string is searched for in the last token only",
        text.Text,
        "_check_end",
        "self.prompt_bytes)",
        "self.begins[-2])",
        law(Request(stop_strings=("ba",))),
    ),
    Mutant(
        15,
        "the text is not cut before the stop string",
        text.Text,
        "certain_end",
        "return self.cut",
        "return len(self.data)",
        test_text.test_shown_is_the_text_of_the_tokens_cut_at_the_stop_and_nothing_shown_is_taken_back,
    ),
    Mutant(
        16,
        "the token budget is overshot",
        text.Text,
        "_check_end",
        "self.remaining <= 0",
        "self.remaining <= -1",
        law(SAMPLED),
    ),
    Mutant(
        17,
        "the whole prefix is passed together with a cache",
        speculate,
        "speculate",
        "context[None, position - 1 :]",
        "context[None]",
        law(Request(prompt=(0, 1))),
    ),
    Mutant(
        18,
        "the position is read off the first layer's cache",
        drafters.ModelDrafter,
        "_read",
        "self.cache, start, self.plan",
        "self.cache, self.cache.lengths[0], self.plan",
        of(SELF_DRAFT, "llama"),
    ),
    Mutant(
        19,
        "a sliding-window cache drops the entries that have left the window",
        KVCache,
        "write",
        "all_values[:, :, start:] = values",
        "all_values[:, :, start:] = values\n"
        "    if layer == 0:\n        all_keys[:, :, : max(0, start - 1)] = 0",
        of(SELF_DRAFT, "gemma2"),
    ),
    Mutant(
        20,
        "an all-zero residual gives NaN",
        verify,
        "verify_by_ratio",
        "torch.where(residual.sum() > 0, residual, p)",
        "residual / residual.sum()",
        test_speculate.test_an_all_zero_residual_draws_from_the_target,
    ),
    Mutant(
        21,
        "statistics divide by zero without a draft",
        rounds.Statistics,
        "acceptance_rate",
        " if self.drafted else None",
        "",
        test_text.test_statistics_count_output_only,
    ),
    Mutant(
        22,
        "an all-accepted round leaves a hole in the draft model's cache",
        drafters.ModelDrafter,
        "propose",
        "context[self.cache.length :]",
        "context[self.cache.length and len(text) - 1 :]",
        of(test_drafters.test_a_draft_models_cache_has_no_hole_after_any_round, "llama"),
    ),
    Mutant(
        23,
        "an unsure token is drawn, looked at and dropped",
        drafters.ModelDrafter,
        "propose",
        "if not policy.keep_drafting(confidence):\n",
        "if not policy.keep_drafting(confidence):\n"
        "                tokens.pop()\n"
        "                rows.pop()\n",
        law(LONG, ADAPTIVE),
    ),
    Mutant(
        24,
        "the prompt is counted as output",
        rounds.Statistics,
        "add",
        "self.tokens += len(round.emitted)",
        "self.tokens += round.position + len(round.emitted)",
        test_text.test_statistics_count_output_only,
    ),
    Mutant(
        25,
        "the baseline is timed without a warm-up",
        generate,
        "write",
        "session.warm_up(ids)",
        "pass",
        test_compare.test_the_baseline_starts_from_the_same_context_after_a_warm_up,
    ),
    Mutant(
        26,
        "probabilities are rounded to bf16 before the ratio",
        verify,
        "in_ratio",
        "p_drafted / q_drafted",
        "p_drafted.bfloat16().to(wide) / q_drafted",
        law(SAMPLED),
    ),
    Mutant(
        27,
        "of two overlapping bans, the first takes back text that was shown already",
        text.Text,
        "certain_end",
        "while begin <",
        "if begin <",
        test_text.test_where_two_bans_overlap_nothing_is_shown_that_the_first_may_yet_take_back,
    ),
    Mutant(
        28,
        "the race uses its exponentials again after a retraction",
        text.Text,
        "_retract",
        "self.retractions += 1",
        "pass",
        test_race.test_after_a_retraction_every_place_has_fresh_exponentials,
    ),
    Mutant(
        29,
        "the draft races with other exponentials than the target",
        drafters.ModelDrafter,
        "propose",
        "text.place(count)",
        "text.place(count + 1000)",
        test_race.test_a_draft_is_kept_as_often_as_shared_exponentials_make_it,
    ),
    Mutant(
        30,
        "the race's exponentials depend on how much was drafted",
        verify,
        "verify_by_race",
        "draw_each(target_probs, place)",
        "draw_each(target_probs, Place(place.position + len(drafted), place.retractions))",
        of(test_grammar.test_under_the_race_every_drafter_writes_the_plain_text, "nested"),
    ),
    Mutant(
        31,
        "one-token and many-token steps take different kernels",
        FastDecoder,
        "__call__",
        "if cache is None",
        "if tokens.shape[1] > 1 or cache is None",
        of(
            test_step.test_the_bits_of_a_row_do_not_depend_on_the_others,
            "llama",
            torch.bfloat16,
            None,
        ),
    ),
    Mutant(
        32,
        "draft and residual share their random numbers under the ratio rule",
        verify.Rule,
        "randomness",
        "return RULES[self.name].new_randomness(self.seed, device, self.sample)",
        "randomness = RULES[self.name].new_randomness(self.seed, device, self.sample)\n"
        "    randomness.draw = KeyedRandomness(self.seed, device, self.sample).draw\n"
        "    return randomness",
        of(test_race.test_over_seeds_the_first_token_has_the_targets_law, "ratio"),
    ),
    Mutant(
        33,
        "exponentials of 24 random bits decide between tens of thousands of tokens",
        race,
        "complements",
        "2**53 - 1 - shifted(bits, 11)",
        "2**53 - 2**29 - (shifted(bits, 40) << 29)",
        test_race.test_a_token_of_probability_one_in_a_billion_wins_as_often_as_it_should,
    ),
    Mutant(
        34,
        "a grammar's matcher is not rolled back after a rejection",
        grammar.GrammarConstraint,
        "_move_to",
        "self.matcher.rollback(len(self.consumed) - kept)",
        "pass",
        under("any of two letters"),
    ),
    Mutant(
        35,
        "a grammar's masks are kept by position only",
        grammar.GrammarConstraint,
        "__call__",
        "self.masks[written] = self.compute(written)[0]\n    return self.masks[written]",
        "self.masks[written] = self.compute(written)[0]\n"
        "    by_position = self.__dict__.setdefault('by_position', {})\n"
        "    return by_position.setdefault(len(tokens), self.masks[written])",
        under("a choice that decides the rest"),
    ),
    Mutant(
        36,
        "bytes that a grammar forces are written without verification, in whichever tokens",
        speculate,
        "speculate",
        "accepted, token = verify(probs,",
        "if type(drafter).__name__ == 'ForcedTokens':\n"
        "            probs[: len(draft.tokens)] = draft.probs.to(probs.dtype)\n"
        "        accepted, token = verify(probs,",
        under(ONE_BYTE, loop_law.Setup(test_grammar.under_grammar(ONE_BYTE, "none"))),
    ),
    Mutant(
        37,
        "block verification stops at the first failure",
        verify,
        "verify_by_block",
        "torch.where(passed, numbers, 0).amax()",
        "passed.long().cumprod(0).sum()",
        law(LONG, rule="block"),
    ),
    Mutant(
        38,
        "after a rejection block verification draws from the ratio rule's residual",
        verify,
        "verify_by_block",
        "residual = torch.cat((residuals, p[-1:]))",
        "residual = torch.cat(((p[:-1] - q).clamp(min=0), p[-1:]))",
        law(LONG, model=random_tables(9, 4, 3), rule="block"),
    ),
    Mutant(
        39,
        "the bonus token comes from the residual of the draft's last row",
        verify,
        "verify_by_block",
        "residual = torch.cat((residuals, p[-1:]))",
        "residual = torch.cat((residuals, (p[-1:] - q[-1:]).clamp(min=0)))",
        law(LONG, rule="block"),
    ),
    Mutant(
        40,
        "the stated q is the softmax before temperature and filters",
        drafters.ModelDrafter,
        "propose",
        "rows.append(probs)",
        "rows.append(torch.softmax(logits, -1))",
        law(FILTERED),
    ),
    Mutant(
        41,
        "drafts are drawn from bf16 logits, q is their float32 softmax",
        drafters.ModelDrafter,
        "propose",
        "randomness.draw(probs[0],",
        "randomness.draw(torch.softmax(logits[0].bfloat16(), -1).to(probs.dtype),",
        law(SAMPLED),
    ),
]


def row_of(mutant: Mutant) -> str:
    """Row of the table of defects in Markdown: the test that fails with it, and the distance that
    the judge of foreign code finds.
    """
    verdict = f"`{mutant.killer.__name__}`" if kills(mutant) else "**nothing**"
    distance = judged(mutant)
    shown = "" if distance is None else f"{distance:.2g}" if distance > EXACT else "0"
    return f"| {mutant.row} | {mutant.defect} | `{mutant.function}` | {verdict} | {shown} |"


if __name__ == "__main__":
    print("This takes about a minute.", file=sys.stderr)
    print("| # | defect | put into | caught by | judged |\n|---|---|---|---|---|")
    for mutant in MUTANTS:
        print(row_of(mutant), flush=True)
