"""Text from a model that train.py trained.

    python examples/language_model/generate.py --run runs/tiny-linear --prompt "def main("

With linear attention, what is remembered of the text has one size however long it grows, so that
--beyond can go on past the length that the model was trained with.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

try:
    from lm_checkpoints import parameters_of
    from lm_config import UserError
    from lm_decoding import Decoder, Words, capacity_for, generate
    from tokenizers import Tokenizer
except ModuleNotFoundError as missing:
    sys.exit(f"{missing.name} is not installed: pip install -e '.[examples]'")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/tiny-linear"))
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--beyond", action="store_true", help="go on past the length of training (linear only)"
    )
    return parser.parse_args(arguments)


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer that the run was trained with, which lies beside its checkpoints."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UserError(f"{folder} has no tokenizer.json: copy it from where the model was trained")
    return Tokenizer.from_file(str(path))


def run(options: argparse.Namespace) -> None:
    if options.tokens < 1:
        raise UserError(f"--tokens is {options.tokens}, but must be 1 or more")
    if options.temperature < 0:
        raise UserError(f"--temperature is {options.temperature}, but must be 0 or more")
    config, parameters = parameters_of(options.run)
    tokenizer = tokenizer_of(options.run)
    prompt = tokenizer.encode(options.prompt).ids
    total = len(prompt) + options.tokens
    if total > config.length and not (options.beyond and config.attention == "linear"):
        raise UserError(
            f"prompt and text have {total} tokens, but the model is configured for "
            f"{config.length}: ask for {max(config.length - len(prompt), 0)} --tokens or fewer, or "
            f"for --beyond with a model of linear attention"
        )
    decoder = Decoder(config, parameters, capacity_for(len(prompt), options.tokens))
    remembered = decoder.remembered(1)
    words = Words(tokenizer)
    print(options.prompt, end="")
    counted, start = 0, 0.0
    for i, tokens in enumerate(
        generate(decoder, prompt, options.tokens, options.temperature, options.seed)
    ):
        print(words.add(tokens), end="", flush=True)
        if i == 1:  # by then both programs are compiled
            start = time.perf_counter()
        elif i > 1:
            counted += len(tokens)
    print()
    speed = f"{counted / (time.perf_counter() - start):,.0f} tokens/s, " if counted else ""
    print(
        f"{speed}{remembered / 2**20:.2f} MiB remembered by {config.attention} attention",
        file=sys.stderr,
    )


def main(arguments: list[str] | None = None) -> int:
    try:
        run(parse(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
