"""Write a corpus of children's stories with a chat model.

``python -m training.corpus --model DIR --tokens N --out FILE`` writes a JSON object with "prompt"
and "response" per line.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.common.command_line import start

    start()

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from app.common.command_line import say
from app.common.device import keep_freed_memory
from app.common.files import check_place, read_json_lines, write_text
from app.common.parsers import DEVICE, DTYPE, MODEL, TEMPERATURE, Groups, script, within
from app.options import Options
from app.session import Session
from model.errors import InputError, explaining
from training.corpus.stories import kept_story, story_request

NARRATOR = "You are a kind teacher who tells stories to small children in short, simple sentences."
FRUITLESS_ROWS = 256  # rows without a new text, after which the command ends
# of two stories that begin with the same 200 characters, the first is kept
DISTINCT_CHARACTERS = 200


def add(stories: dict[str, dict[str, str]], more: Iterable[dict[str, str]]) -> None:
    """Add the stories of ``more`` whose "response" begins like none before."""
    for story in more:
        stories.setdefault(story["response"][:DISTINCT_CHARACTERS], story)


def write_stories(session: Session, rows: int, rng: random.Random) -> Iterator[dict[str, str]]:
    """Let the model write ``rows`` stories, and yield those worth learning: each a "prompt" and a
    "response".

    A request is a turn of a chat or, without a chat template, plain text. The model continues an
    opening of the story.
    """
    tokenizer = session.tokenizer
    narrated = session.options.merged({"system": NARRATOR})
    seed = rng.getrandbits(63)
    requests = [story_request(rng) for _ in range(rows)]
    begun = []
    for prompt, opening, _ in requests:
        try:
            ids = session.encode(prompt, narrated)
        except InputError:  # no template, or one that refuses a system message
            ids = session.encode(prompt)
        begun.append(ids + tokenizer.encode_parts(opening))
    samples = session.write_all(begun, seed=seed)
    for (prompt, opening, subjects), sample in zip(requests, samples, strict=True):
        tokens = [token for token in sample.tokens if token not in tokenizer.eos_ids]
        story = kept_story(tokenizer.decode(tokenizer.encode_parts(opening) + tokens), subjects)
        if story and set(tokenizer.special.values()).isdisjoint(tokens):
            yield {"prompt": prompt, "response": story}


OPTIONS: Groups = {
    "": {
        "--model": MODEL,
        "--tokens": {
            "type": within(int, 1),
            "required": True,
            "metavar": "N",
            "help": "tokens of responses wanted in the file",
        },
        "--out": {
            "type": Path,
            "required": True,
            "metavar": "FILE",
            "help": ".jsonl; an earlier one is continued",
        },
        "--temperature": {**TEMPERATURE, "type": float, "default": 0.8},
        "--top-k": {"type": int, "default": 80, "metavar": "K", "help": "0: off"},
        "--max-new-tokens": {
            "type": within(int, 1),
            "default": 320,
            "metavar": "N",
            "help": "most tokens of a response",
        },
        "--batch": {
            "type": within(int, 1),
            "default": 128,
            "metavar": "B",
            "help": "texts at a time; fewer take less memory",
        },
        "--seed": {"type": int, "default": 0, "metavar": "S", "help": "same seed: same texts"},
        "--device": DEVICE,
        "--dtype": DTYPE,
    },
}


def run(options: argparse.Namespace) -> None:
    """Read the file, load the model, and add batches of stories until the file has
    ``options.tokens`` tokens. It is written atomically after each.

    A batch depends on the seed and on the contents of the file only, so that a run that was killed
    continues to the same file. Raises InputError when the model writes nothing new any more.
    """
    stories: dict[str, dict[str, str]] = {}
    check_place(options.out)
    if options.out.exists():
        with explaining(
            f"{options.out} is not a file of this command: give another", (KeyError, TypeError)
        ):
            add(stories, [row for _, row in read_json_lines(options.out)])
    session = Session(
        Options(
            model=options.model,
            device=options.device,
            dtype=options.dtype,
            draft="none",
            temperature=options.temperature,
            top_k=options.top_k,
            max_new_tokens=options.max_new_tokens,
        )
    )
    fruitless = 0
    keep_freed_memory()
    while True:
        tokens = sum(
            len(session.tokenizer.encode_parts(story["response"])) for story in stories.values()
        )
        say(f"{options.out}: {len(stories)} texts, {tokens:,} of {options.tokens:,} tokens")
        if tokens >= options.tokens:
            return
        if fruitless >= FRUITLESS_ROWS:
            raise InputError(
                f"the last {fruitless} texts were useless or not new: raise --temperature or"
                " --top-k"
            )
        before = len(stories)
        rows = min(options.batch, 1 + (options.tokens - tokens) // options.max_new_tokens)
        rng = random.Random(f"{options.seed} {before} {fruitless}")
        add(stories, write_stories(session, rows, rng))
        write_text(options.out, "".join(json.dumps(each) + "\n" for each in stories.values()))
        fruitless = 0 if len(stories) > before else fruitless + rows


main = script(
    run,
    OPTIONS,
    "python -m training.corpus",
    __doc__,
    "interrupted: run the same command again to continue",
)


if __name__ == "__main__":
    sys.exit(main())
