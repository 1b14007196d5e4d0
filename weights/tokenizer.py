"""Tokenizers: text to token ids and back, for plain texts and for conversations.

A text is encoded by the tokenizers library, and decoded by the bytes of each token. Knows nothing
of the fields of files, which ``tokenizer_files`` reads, and of Jinja, which ``chat_template``
renders.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from app.common.command_line import say
from app.common.files import read_optional_json, read_text
from model.errors import InputError, explaining
from weights.chat_template import default_template, render
from weights.tokenizer_files import (
    BYTE_LEVEL_SPACE,
    SPACE_MARK,
    begin_with,
    control_tokens,
    ending_ids,
    named_tokens,
    pieces_of,
    read_library,
    tokenizer_file,
)

# a text whose tokens must be spelt as the file's own decoder spells them; no template holds it
SAMPLE = "The quick brown fox isn't 12 years old.\n\n\tif (x != [3.5]):  naïve café — 日本語"


def random_word() -> str:
    """Return a word that no text contains, of characters without a meaning."""
    return "".join(chr(secrets.choice(range(0xE000, 0xF900))) for _ in range(12))


class Tokenizer:
    """Tokenizer of a model folder.

    The name of a control token counts as the token in a chat template and in a whole prompt. In a
    message it is text, so that no user can end a turn by typing one.

    For callers:

    ``special``       ids of control tokens by name
    ``pieces``        bytes that each token adds to the text: none for a control token. Streaming,
                      stop strings and banned words work on bytes, because a token may end in the
                      middle of a UTF-8 character
    ``eos_ids``       tokens that end a text
    ``chat_template`` source of the template, in Jinja; None: there is none

    For encoding and decoding:

    ``library``       the tokenizer that encodes and decodes, and ``normalise`` the function that a
                      text passes before it
    ``is_byte_level`` whether pieces have a character per byte: else they are sentencepiece's
    ``adds_space``    whether encoding puts a space before the text
    ``finder``        a tokenizer that finds names of added tokens only, by the rules of each: which
                      blanks belong to it, and where it counts
    ``names``         names of some control tokens by role, such as "bos_token"; "" for a role
                      without one
    ``any_name``      pattern of all their names; without names it matches nothing
    ``stand_in``      a random word that is read: the library has it as a token of its own, and it
                      stands for a control token in the text of parts that are encoded together
    ``hiding_mark``   a random word that is removed again: while a chat template is rendered it
                      comes after each character of the typed name of a control token, and hides it
    """

    def __init__(self, folder: Path) -> None:
        """Read the folder's tokenizer files. Raises InputError when they are absent or damaged."""
        path = tokenizer_file(folder)
        config = folder / "tokenizer_config.json"
        settings = read_optional_json(config)
        with explaining(
            f"{config} is damaged: fetch it again",
            (AttributeError, KeyError, TypeError, ValueError),
        ):
            self.names, listed = named_tokens(settings)
            self.chat_template = default_template(settings.get("chat_template"))
        if (folder / "chat_template.jinja").exists():
            self.chat_template = read_text(folder / "chat_template.jinja")
        self.stand_in = random_word()
        self.hiding_mark = random_word()
        # raised by the library
        with explaining(f"{path} is not a tokenizer that can be read", (Exception,)):
            self._read_tokens(path, listed)
        # As in transformers, tokenizer_config.json overrides the rule of the tokenizer file.
        wants_bos = settings.get("add_bos_token")
        if wants_bos is not None:
            bos = self.names["bos_token"] if wants_bos else ""
            begin_with({bos: self.special[bos]} if bos in self.special else {}, self.library)
        longest_first = sorted(self.special, key=len, reverse=True)
        self.any_name = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.eos_ids = ending_ids(folder, self.special.get(self.names["eos_token"]))
        if self.chat_template is not None:
            self._check_end_of_turn(folder)

    def _read_tokens(self, path: Path, listed: Mapping[int, AddedToken]) -> None:
        """Read a tokenizer file, with the control tokens that tokenizer_config.json has ``listed``.
        Raises InputError for a decoder of another kind, and errors of any kind for a damaged file.
        """
        # 1. The library, and in it the control tokens of both files.
        self.library, self.normalise = read_library(path)
        vocabulary = self.library.get_vocab(with_added_tokens=True)
        self.special = control_tokens(self.library, vocabulary, listed, self.names.values())
        # 2. From here on the library has them all among its added tokens.
        added = self.library.get_added_tokens_decoder()
        self.finder = tokenizers.Tokenizer(models.BPE())
        self.finder.add_tokens([*added.values(), *listed.values()])  # the last of a name counts
        # 3. The spelling of pieces, as the file's decoder shows it, and so the bytes of each token.
        decoder = self.library.decoder or decoders.Fuse()
        self.is_byte_level = decoder.decode(["a", BYTE_LEVEL_SPACE]) == "a "
        space = BYTE_LEVEL_SPACE if self.is_byte_level else SPACE_MARK
        self.adds_space = decoder.decode([space + "a"]) == "a"
        self.pieces = pieces_of(vocabulary, added, self.special, self.is_byte_level)
        # 4. These bytes must be the text that the decoder makes of the same tokens.
        sample = [each for each in self.library.encode(SAMPLE).ids if each not in added]
        if self.decode(sample) != self.library.decode(sample):
            raise InputError(
                f"{path}: its decoder is none of the kinds that this project reads, ByteLevel and"
                " Sentencepiece: use a model with one"
            )
        # 5. A token that the model does not have: last, so that no vocabulary above holds it.
        self.library.add_tokens([AddedToken(self.stand_in, normalized=False)])

    def _check_end_of_turn(self, folder: Path) -> None:
        """Print a line where the chat template ends answers with a token that ends no text."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SAMPLE}]
        text = ""
        with suppress(InputError):
            text = render(self.chat_template, turns, self.names, {}, add_generation_prompt=False)
        _, _, rest = text.partition(SAMPLE)
        end = next((part for part in self._split(rest) if isinstance(part, int)), None)
        if end is not None and end not in self.eos_ids:
            say(
                f"{folder.name}: answers do not end at the chat template's end of turn: to end them"
                f" there, add {end} to eos_token_id in its generation_config.json"
            )

    def encode(self, text: str, *, find_names: bool = False) -> list[int]:
        """Return the token ids of a plain text, after a beginning-of-text token where one is
        expected. With ``find_names``, names of control tokens in it are control tokens.
        """
        parts = self._split(text) if find_names else [text]
        return self.encode_parts(*parts, begin=True)

    def encode_continuation(self, text: str) -> list[int]:
        """Return the token ids of a text that continues another one, with nothing before it."""
        if self.is_byte_level:
            return self.library.encode(text, add_special_tokens=False).ids
        marked = text.replace(" ", SPACE_MARK)
        return [piece.id for piece in self.library.model.tokenize(marked)]

    def encode_parts(self, *parts: int | str, begin: bool = False) -> list[int]:
        """Return the token ids of parts: texts, and control tokens given as ids.

        A beginning-of-text token comes before them only where they ``begin`` a text. They are
        encoded together, because a text may be encoded differently after a control token.
        """
        control = (part for part in parts if isinstance(part, int))
        text = "".join(
            self.stand_in if isinstance(part, int) else self.normalise(part) for part in parts
        )
        ids = self.library.encode(text, add_special_tokens=begin).ids
        stand_in = self.library.token_to_id(self.stand_in)
        return [next(control) if number == stand_in else number for number in ids]

    def _split(self, text: str) -> list[int | str]:
        """Return the parts of a text: the ids of control tokens that it names, and texts between.

        A name is found in the text as typed, before any normalisation, and not where it is hidden.
        With a control token "<s>" of id 1, and "~" for the hiding mark:

            "<s>Say <s>"     ->  ["", 1, "Say ", 1, ""]
            "<s>Say <~s~>~"  ->  ["", 1, "Say <~s~>~"]
        """
        tokens = self.finder.get_added_tokens_decoder()
        found = self.finder.encode(text)
        parts: list[int | str] = []
        rest = 0
        for number, (begin, end) in zip(found.ids, found.offsets, strict=True):
            name = tokens[number].content
            # The mark breaks up longer names. A name of one character is only followed by it.
            is_hidden = text.startswith(self.hiding_mark, end)
            if name in self.special and not is_hidden:
                parts += text[rest:begin], self.special[name]
                rest = end
        return [*parts, text[rest:]]

    def encode_chat(
        self,
        messages: Sequence[dict[str, str]],
        answer: str = "",
        variables: Mapping[str, Any] = {},
    ) -> list[int]:
        """Return the token ids of a conversation up to the beginning of the assistant's answer, and
        of an ``answer`` that has begun. The template also has these ``variables``, JSON values.

        Each message is ``{"role": "system" | "user" | "assistant", "content": text}``. Names of
        control tokens are control tokens in the template, and text in a content or a variable.
        Raises InputError without a template, if it refuses, or if it does not read a variable.
        """
        if self.chat_template is None:
            raise InputError("this model has no chat template: it continues plain text only")
        hidden = [each | {"content": self._hidden(each["content"])} for each in messages]
        given = {name: self._hidden(value) for name, value in variables.items()}
        rendered = render(self.chat_template, hidden, self.names, given)
        parts = self._split(rendered + self._hidden(answer))
        return self.encode_parts(
            *(
                each if isinstance(each, int) else each.replace(self.hiding_mark, "")
                for each in parts
            )
        )

    def _hidden(self, value: Any) -> Any:
        """Return a text, or a JSON value with texts in it, whose names of control tokens are
        hidden: "<s>" is "<~s~>~", with "~" for the hiding mark.
        """
        match value:
            case str():
                return self.any_name.sub(
                    lambda name: "".join(each + self.hiding_mark for each in name[0]), value
                )
            case Mapping():
                return {self._hidden(key): self._hidden(each) for key, each in value.items()}
            case list() | tuple():
                return [self._hidden(each) for each in value]
        return value

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text: none for an id outside the vocabulary."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens from its beginning; bytes that are not UTF-8 become
        U+FFFD.

        It is the concatenation of their ``token_bytes``, without the space that encoding puts
        before a text.
        """
        data = b"".join(map(self.token_bytes, tokens))
        return data.removeprefix(b" " if self.adds_space else b"").decode("utf-8", errors="replace")
