"""Tokenizers: text to token ids and back, and chat templates.

Two kinds of files are read into the tokenizers library: ``tokenizer.json``, its own, and
``tokenizer.model``, sentencepiece's. A piece is a token as the file spells it: byte-level, in an
alphabet with a character per byte, or by the rules of sentencepiece.
"""

import json
import re
import secrets
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import sentencepiece
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from app.common.command_line import say
from app.common.files import check_is_fetched, read_optional_json, read_text
from model.config import LARGEST
from model.errors import InputError, explaining

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
SPACE_MARK = "▁"  # a space in sentencepiece's pieces
# tag of a chat template around an answer, which marks it for training
GENERATION_TAG = re.compile(r"({%[-+]?\s*(?:end)?)generation(\s*[-+]?%})")
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# of an added token: whether blanks before and after belong to it, and whether it may touch letters
FLAGS = ("lstrip", "rstrip", "single_word")
# a text whose tokens must be spelt as the file's own decoder spells them
SAMPLE = "The quick brown fox isn't 12 years old.\n\n\tif (x != [3.5]):  naïve café — 日本語"

# Byte of each character of a byte-level piece, in the alphabet of GPT-2: printable bytes are
# themselves, the others are, in order, the characters from U+0100 on.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_OF_CHARACTER = {chr(byte): byte for byte in PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(sorted({*range(256)} - {*PRINTABLE}))
}


class Tokenizer:
    """Tokenizer of a model folder. Names of control tokens count in a chat template and in a whole
    prompt. In a message they are text, so that no user can end a turn by typing one.

    ``library``       the tokenizer that encodes and decodes, and ``normalise`` the function that a
                      text passes before it
    ``finder``        a tokenizer that finds names of added tokens only, by the rules of each: which
                      blanks belong to it, and where it counts
    ``byte_level``    whether pieces are byte-level
    ``bos``           the beginning-of-text token that tokenizer_config.json asks for, if any; where
                      it says nothing, ``file_decides_bos``
    ``special``       ids of control tokens by name
    ``any_name``      pattern of their names, which matches nothing where there are none
    ``names``         names of some of them by role, such as "bos_token"; "" for a role without one
    ``pieces``        bytes that each token adds to the text: none for a control token. Streaming,
                      stop strings and banned words work on bytes, because a token may end in the
                      middle of a UTF-8 character
    ``eos_ids``       tokens that end a text
    ``adds_space``    whether encoding puts a space before the text
    ``chat_template`` source of the template, in Jinja; None: there is none
    ``placeholder``   a random word, which no text contains, as a token of its own. It stands for a
                      control token while a text is encoded, and hides typed names of control tokens
                      while a chat template is rendered
    """

    def __init__(self, folder: Path) -> None:
        """Read the folder's tokenizer files. Raises InputError when they are absent or damaged."""
        files = (folder / name for name in ("tokenizer.json", "tokenizer.model"))
        path = next((file for file in files if file.is_file()), None)
        if path is None:
            raise InputError(
                f"{folder} holds no tokenizer.json and no tokenizer.model: fetch it again with one"
            )
        check_is_fetched(path)
        config = folder / "tokenizer_config.json"
        settings = read_optional_json(config)
        with explaining(
            f"{config} is damaged: fetch it again",
            (AttributeError, KeyError, TypeError, ValueError),
        ):
            self.names, listed = named_tokens(settings)
            self.chat_template = plain_chat(settings.get("chat_template"))
        if (folder / "chat_template.jinja").exists():
            self.chat_template = read_text(folder / "chat_template.jinja")
        private = range(0xE000, 0xF900)  # characters without a meaning
        self.placeholder = "".join(chr(secrets.choice(private)) for _ in range(12))
        # raised by the libraries
        with explaining(f"{path} is not a tokenizer that can be read", (Exception,)):
            self._read_tokens(path, listed)
        longest_first = sorted(self.special, key=len, reverse=True)
        self.any_name = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        # As in transformers, tokenizer_config.json overrides the rule of the tokenizer file.
        wants_bos = settings.get("add_bos_token")
        self.file_decides_bos = wants_bos is None
        self.bos = self.special.get(self.names["bos_token"]) if wants_bos else None
        self.eos_ids = frozenset({self.special.get(self.names["eos_token"])} - {None})
        for name in ("config.json", "generation_config.json"):  # the last that names any is right
            found = read_optional_json(folder / name).get("eos_token_id")
            if found is not None:
                self.eos_ids = token_ids(found, f"{folder / name}: eos_token_id")
        if self.chat_template is not None:
            self._check_end_of_turn(folder)

    def _read_tokens(self, path: Path, listed: Mapping[int, AddedToken]) -> None:
        """Read a tokenizer file, with the control tokens that tokenizer_config.json has ``listed``.
        Raises InputError for a decoder of another kind, and errors of any kind for a damaged file.
        """
        self.library, self.normalise = read_library(path)
        vocabulary = self.library.get_vocab(with_added_tokens=True)
        self.special = control_tokens(self.library, vocabulary, listed, self.names.values())
        added = self.library.get_added_tokens_decoder()
        self.finder = tokenizers.Tokenizer(models.BPE())
        self.finder.add_tokens([*added.values(), *listed.values()])  # the last of a name counts
        decoder = self.library.decoder or decoders.Fuse()
        self.byte_level = decoder.decode(["Ġ"]) == " "
        self.adds_space = decoder.decode([SPACE_MARK + "a"]) == "a"
        self.pieces = pieces_of(vocabulary, added, self.special, self.byte_level)
        sample = [each for each in self.library.encode(SAMPLE).ids if each not in added]
        if self.decode(sample) != self.library.decode(sample):
            raise InputError(
                f"{path}: its decoder is neither byte-level nor that of sentencepiece, the kinds"
                " that this project reads: use a model with one of them"
            )
        # A token that the model does not have: its vocabulary was read before.
        self.library.add_tokens([AddedToken(self.placeholder, normalized=False)])

    def _check_end_of_turn(self, folder: Path) -> None:
        """Say so where the control token after an answer of the chat template ends no text."""
        answer = self.placeholder
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
        rest = ""
        with suppress(InputError):
            rest = self._render(turns, add_generation_prompt=False).partition(answer)[2]
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
        """Return the token ids of a text that continues another one: no beginning and no space
        before it.
        """
        if self.byte_level:
            return self.library.encode(text, add_special_tokens=False).ids
        return [piece.id for piece in self.library.model.tokenize(text.replace(" ", SPACE_MARK))]

    def encode_parts(self, *parts: int | str, begin: bool = False) -> list[int]:
        """Return the token ids of texts and, given as ids, control tokens between them; nothing
        before, unless they ``begin`` a text.

        They are encoded together, because a text after a control token may be encoded differently
        from one at the beginning.
        """
        control = (part for part in parts if isinstance(part, int))
        text = "".join(
            self.placeholder if isinstance(part, int) else self.normalise(part) for part in parts
        )
        ids = self.library.encode(text, add_special_tokens=begin and self.file_decides_bos).ids
        placeholder = self.library.token_to_id(self.placeholder)
        bos = [] if self.bos is None or not begin else [self.bos]
        return bos + [next(control) if number == placeholder else number for number in ids]

    def _split(self, text: str) -> list[int | str]:
        """Return the ids of the control tokens that a text names, and the texts between them.

        A name counts as it is spelt, before any normalisation, and not where it is hidden.
        """
        tokens = self.finder.get_added_tokens_decoder()
        found = self.finder.encode(text)
        parts: list[int | str] = []
        rest = 0
        for number, (begin, end) in zip(found.ids, found.offsets, strict=True):
            name = tokens[number].content
            is_hidden = text.startswith(self.placeholder, end)  # a name of one character
            if name in self.special and not is_hidden:
                parts += text[rest:begin], self.special[name]
                rest = end
        return [*parts, text[rest:]]

    def encode_chat(
        self,
        messages: Sequence[dict[str, str]],
        answer: str = "",
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Return the token ids of a conversation, up to the beginning of the assistant's answer, or
        up to the end of an ``answer`` that has begun. The template also has these ``variables``,
        JSON values.

        Each message is ``{"role": "system" | "user" | "assistant", "content": text}``. Names of
        control tokens are control tokens in the template, and text in a content or a variable.
        Raises InputError without a template, if it refuses, or if it does not read a variable.
        """
        if self.chat_template is None:
            raise InputError("this model has no chat template: leave out --chat and --system")
        hidden = [each | {"content": self._hide_names(each["content"])} for each in messages]
        given = json.loads(self._hide_names(json.dumps(dict(variables), ensure_ascii=False)))
        rendered = self._render(hidden, given) + self._hide_names(answer)
        return self.encode_parts(
            *(
                part if isinstance(part, int) else part.replace(self.placeholder, "")
                for part in self._split(rendered)
            )
        )

    def _hide_names(self, text: str) -> str:
        """Return the text with a placeholder after each character of a name of a control token."""
        return self.any_name.sub(
            lambda found: "".join(character + self.placeholder for character in found[0]), text
        )

    def _render(
        self,
        messages: Sequence[dict[str, str]],
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of a conversation by the chat template, with these variables and those of
        transformers.
        """

        def refuse(message: str) -> None:
            raise InputError(f"the model's chat template refuses this conversation: {message}")

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = to_json
        template = GENERATION_TAG.sub(r"\1with\2", self.chat_template)  # both are a scope
        # a template can raise any error
        with explaining("the model's chat template fails", (Exception,)):
            for name in variables.keys() - find_undeclared_variables(environment.parse(template)):
                raise InputError(
                    f"the chat template has no variable {name!r:.80}", "chat_template_kwargs"
                )
            return as_text(
                environment.from_string(template).render(
                    messages=messages,
                    add_generation_prompt=add_generation_prompt,
                    tools=None,
                    documents=None,
                    raise_exception=refuse,
                    strftime_now=lambda form: datetime.now().strftime(form),
                    **self.names,
                    **variables,
                )
            )

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text: none for an id outside the vocabulary."""
        return self.pieces[token] if token < len(self.pieces) else b""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens from its beginning; bytes that are not UTF-8 become
        U+FFFD.

        It is the concatenation of their ``token_bytes``, without the space that encoding puts
        before a text.
        """
        data = b"".join(map(self.token_bytes, tokens))
        return data.removeprefix(b" " if self.adds_space else b"").decode("utf-8", errors="replace")


def named_tokens(settings: dict[str, Any]) -> tuple[dict[str, str], dict[int, AddedToken]]:
    """Return the names of tokens by role, and control tokens by id, from tokenizer_config.json.

    Raises errors of several kinds for a form that transformers does not write.
    """
    given = {key: settings.get(key) or "" for key in NAMED_TOKENS}
    names = {
        key: as_text(name["content"] if isinstance(name, dict) else name)
        for key, name in given.items()
    }
    listed = {
        int(number): AddedToken(
            as_text(entry["content"]),
            special=True,
            **{flag: entry.get(flag, False) for flag in FLAGS},
        )
        for number, entry in (settings.get("added_tokens_decoder") or {}).items()
        if entry["special"]
    }
    token_ids([*listed], "added_tokens_decoder")
    return names, listed


def plain_chat(template: Any) -> str | None:
    """Return the template for plain chat: the only one, or of several by name the default."""
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}.get("default")
    return None if template is None else as_text(template)


def to_json(value: Any, ensure_ascii: bool = False, **more: Any) -> str:
    """Return JSON for a chat template, by the filter of transformers: Jinja's escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **more)


def as_text(value: Any) -> str:
    """Return the value. Raises TypeError or ValueError unless it is a text of whole characters."""
    if not isinstance(value, str):
        raise TypeError(f"a text is wanted, found {value!r:.80}")
    value.encode()  # fails for half of a surrogate pair
    return value


def token_ids(value: Any, place: str) -> frozenset[int]:
    """Return the set of one token id or of a list of them. Raises InputError, which names the
    ``place``, for any other value.
    """
    ids = value if isinstance(value, list) else [value]
    if not all(type(each) is int and 0 <= each < LARGEST for each in ids):
        raise InputError(f"{place} must be a token id or a list of them, found {value!r:.80}")
    return frozenset(ids)


def read_library(path: Path) -> tuple[tokenizers.Tokenizer, Callable[[str], str]]:
    """Return the tokenizer of a file, which encodes the names of control tokens as text; and the
    function that normalises a text before it. Only sentencepiece has one. Raises errors of any
    kind.
    """
    library, normalise = (
        (tokenizers.Tokenizer.from_file(str(path)), str)
        if path.suffix == ".json"
        else read_sentencepiece(path)
    )
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True  # as text
    return library, normalise


def read_sentencepiece(path: Path) -> tuple[tokenizers.Tokenizer, Callable[[str], str]]:
    """Return the byte-pair encoding of a ``tokenizer.model``, and its normalisation of a text.
    Raises InputError for a unigram model.

    Its file has no merges but a score per piece. A piece is merged from any two pieces, the higher
    its score the earlier. User-defined pieces are found before any merge. They are those of score 0
    that stay whole under a dropout of 1, with which sentencepiece merges nothing.
    """
    library = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    pieces = [library.IdToPiece(number) for number in range(library.GetPieceSize())]
    control = [
        piece for n, piece in enumerate(pieces) if library.IsControl(n) or library.IsUnknown(n)
    ]
    ranks = {
        piece: -library.GetScore(n)
        for n, piece in enumerate(pieces)
        if piece not in control and not library.IsByte(n)
    }
    if any(rank % 1 for rank in ranks.values()):
        raise InputError(f"{path} is no byte-pair encoding: give the model a tokenizer.json")
    whole = [
        each
        for each, rank in ranks.items()
        if rank == 0 and each in library.SampleEncodeAsPieces(each, -1, 1.0)
    ]
    words = ranks.keys() - {*whole}
    merges = [
        (word[:cut], word[cut:])
        for word in sorted(words, key=lambda word: (ranks[word], word))
        for cut in range(1, len(word))
        if word[:cut] in words and word[cut:] in words
    ]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)},
            merges,
            unk_token=pieces[library.unk_id()],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = library.DecodePieces([SPACE_MARK + "a"]) == "a"
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE_MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", int(adds_space), 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in control])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in whole])
    if (bos := library.bos_id()) >= 0:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{pieces[bos]} $A", special_tokens=[(pieces[bos], bos)]
        )
    return tokenizer, library.Normalize


def byte_level_tokenizer(model: models.BPE) -> tokenizers.Tokenizer:
    """Return a tokenizer that splits a text into words and digits, and encodes their bytes by
    ``model``.
    """
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def control_tokens(
    library: tokenizers.Tokenizer,
    vocabulary: Mapping[str, int],
    listed: Mapping[int, AddedToken],
    names: Iterable[str],
) -> dict[str, int]:
    """Return the ids of control tokens by name: those of the tokenizer file, and those that
    tokenizer_config.json has ``listed`` (with ids) or only named.

    Of the latter, the tokens in the file's vocabulary become control tokens of the library too. The
    ids of the others are beyond the vocabulary.
    """
    own = {
        token.content: number
        for number, token in library.get_added_tokens_decoder().items()
        if token.special
    }
    given = {token.content: number for number, token in listed.items()}
    more = {*given, *names} & vocabulary.keys() - own.keys()
    library.add_special_tokens([AddedToken(each, normalized=False) for each in sorted(more)])
    return {**given, **{each: vocabulary[each] for each in more}, **own}


def pieces_of(
    vocabulary: Mapping[str, int],
    added: Container[int],
    special: Mapping[str, int],
    byte_level: bool,
) -> list[bytes]:
    """Return the bytes of each token by its id: none for control tokens and for ids without a
    token. An ``added`` token is plain text, also where other pieces are byte-level.
    """
    largest = max(*vocabulary.values(), *special.values())
    token_ids(largest, "its largest token id")  # a damaged file must not ask for a billion
    pieces = [b""] * (1 + largest)
    for piece in vocabulary.keys() - special.keys():
        number = vocabulary[piece]
        is_text = byte_level and number in added
        pieces[number] = piece.encode() if is_text else piece_bytes(piece, byte_level)
    return pieces


def piece_bytes(piece: str, byte_level: bool) -> bytes:
    """Return the bytes of a piece, byte-level or of sentencepiece, which writes a raw byte as
    ``<0x0A>``.
    """
    if byte_level:
        return bytes(BYTE_OF_CHARACTER[character] for character in piece)
    byte = BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE_MARK, " ").encode()
