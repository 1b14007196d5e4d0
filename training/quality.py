"""Quality of story models: bits per byte of held-out text, and repetition in their stories.

``python -m training.quality --model A --model B --data FILE`` prints a row per model. Bits per byte
compare models whose tokenizers differ.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from app.start import start

    start()

import argparse
import math
import random
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console

from app.parsers import TEMPERATURE, Groups, run_script, within
from app.session import load
from app.table import Row, table
from model.decoder import Decoder
from model.errors import InputError
from training.corpus.stories import repetition, story_request
from training.text import is_held_out, read_documents
from weights.tokenizer import Tokenizer

STORIES = 100
WRITING = {  # options of generate.py
    "draft": "none",
    "device": "cpu",
    "dtype": "float32",
    "max_new_tokens": 160,
    "seed": 0,
}

OPTIONS: Groups = {
    "": {
        "--model": {"action": "append", "required": True, "help": "a folder or name; repeatable"},
        "--data": {
            "type": Path,
            "nargs": "+",
            "required": True,
            "metavar": "FILE",
            "help": "text of the training, whose held-out documents are read",
        },
        "--documents": {
            "type": within(int, 1),
            "default": 200,
            "metavar": "N",
            "help": "most documents to read",
        },
        "--temperature": {**TEMPERATURE, "default": 0.7},
    },
}


@torch.inference_mode()
def bits_per_byte(model: Decoder, tokenizer: Tokenizer, documents: list[str]) -> float:
    """Return the bits in which the model codes a byte of these documents, each read by itself, up
    to the model's context.
    """
    nats = 0.0
    size = 0
    for document in documents:
        ids = tokenizer.encode(document)
        not_coded = ids[:1] + ids[model.max_positions :]
        size += len(document.encode()) - sum(map(len, map(tokenizer.token_bytes, not_coded)))
        tokens = torch.tensor([ids[: model.max_positions]])
        logits = model(tokens[:, :-1]).float()
        nats += F.cross_entropy(logits[0], tokens[0, 1:], reduction="sum").item()
    return nats / math.log(2) / size


def run(options: argparse.Namespace) -> None:
    """Print a row per model. Raises InputError where no document is held out."""
    documents = [each for each in read_documents(options.data) if is_held_out(each)]
    documents = documents[: options.documents]
    if not documents:
        raise InputError("none of the documents is held out: give more text")
    rng = random.Random(0)
    requests = [story_request(rng)[0] for _ in range(STORIES)]
    rows: list[Row] = []
    for name in options.model:
        session = load(name, temperature=options.temperature, **WRITING)
        stories = [sample.text for sample in session.write_all(requests)]
        rows.append(
            {
                "model": name,
                "bits per byte": bits_per_byte(session.model, session.tokenizer, documents),
                "repeated sequences of four words": statistics.fmean(map(repetition, stories)),
                "words per story": statistics.fmean(len(story.split()) for story in stories),
            }
        )
    Console().print(table(rows, f"{len(documents)} held-out documents, {STORIES} stories"))


def main(arguments: list[str] | None = None) -> int:
    return run_script(run, OPTIONS, "python -m training.quality", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
