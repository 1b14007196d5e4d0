"""Quality of story models: bits per byte of held-out text, and repetition in their stories.

``python -m training.quality --model A --model B --data FILE`` prints a row per model. Bits per byte
compare models whose tokenizers differ.
"""

if __name__ == "__main__":  # before anything that takes long to import
    from cli.start import start

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

from cli.command_line import run_command
from cli.options import TEMPERATURE, Groups, parser_of, within
from cli.table import Row, table
from decoding.run.prompt import encode_prompt
from decoding.sampling import SamplingParams
from model import Decoder, InputError
from training.corpus.sampling import sample_texts
from training.corpus.stories import repetition, story_request
from training.text import is_held_out, read_documents
from weights.load import load_model, model_folder
from weights.tokenizer import Tokenizer

STORIES = 100
TOKENS = 160  # of the longest story

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
    """Bits in which the model codes a byte of these documents, each read by itself, up to the
    model's context.
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


def written_stories(
    model: Decoder, tokenizer: Tokenizer, params: SamplingParams, seed: int = 0
) -> list[str]:
    """Stories that a model writes on requests which do not depend on the model."""
    rng = random.Random(seed)
    prompts = [encode_prompt(tokenizer, story_request(rng)[0]) for _ in range(STORIES)]
    texts = sample_texts(
        model,
        prompts,
        max_new_tokens=TOKENS,
        params=params,
        eos_ids=tokenizer.eos_ids,
        seed=seed,
    )
    return [tokenizer.decode(text) for text in texts]


def run(options: argparse.Namespace) -> None:
    """Print a row per model. Raises InputError where no document is held out."""
    documents = [each for each in read_documents(options.data) if is_held_out(each)]
    documents = documents[: options.documents]
    if not documents:
        raise InputError("none of the documents is held out: give more text")
    rows: list[Row] = []
    for name in options.model:
        folder = model_folder(name)
        model = load_model(folder, torch.float32)
        tokenizer = Tokenizer(folder)
        stories = written_stories(model, tokenizer, SamplingParams(options.temperature))
        rows.append(
            {
                "model": name,
                "bits per byte": bits_per_byte(model, tokenizer, documents),
                "repeated sequences of four words": statistics.fmean(map(repetition, stories)),
                "words per story": statistics.fmean(len(story.split()) for story in stories),
            }
        )
    Console().print(table(rows, f"{len(documents)} held-out documents, {STORIES} stories"))


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(
        OPTIONS, prog="python -m training.quality", description=__doc__.splitlines()[0]
    )
    return run_command(lambda: run(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
