"""``smddprun`` and ``smddpmprun``: the commands that SageMaker containers put between mpirun and the script.

    mpirun -np 2 ... smddprun python -m mpi4py train.py
    mpirun -np 2 ... smddpmprun -i ml.p4d.24xlarge --allow-bypass python -m mpi4py train.py

Both add RANK, LOCAL_RANK, WORLD_SIZE and the rest to the environment of a rank, where scripts find them
without importing this package, and then become the rank's program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from opensmd.environment.variables import fill

__all__ = ["main"]

_NOT_FOUND = 127  # a shell's status for a missing command


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-i", "--instance", hidden=True, help="The kind of machine; makes no difference here.")
@click.option("--allow-bypass", is_flag=True, hidden=True, help="Makes no difference here.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@click.version_option(package_name="opensmd")
def main(instance: str | None, allow_bypass: bool, program: Sequence[str]) -> None:
    """Run PROGRAM as a rank of mpirun, srun or torchrun, with the variables that torch.distributed reads.

    Started by hand, PROGRAM is a group of one.
    """
    if fill() is None:
        os.environ.setdefault("LOCAL_RANK", "0")
    sys.stdout.flush()
    try:
        os.execvp(program[0], list(program))
    except OSError as error:
        click.echo(f"{program[0]}: {error.strerror}; expected a program, such as python train.py", err=True)
        raise SystemExit(_NOT_FOUND) from None


if __name__ == "__main__":
    main()
