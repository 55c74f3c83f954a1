"""The former path of powergossip/mpi_check.py:  mpirun -np N python environment/mpi_check.py"""

from powergossip.mpi_check import command

if __name__ == "__main__":
    command()
