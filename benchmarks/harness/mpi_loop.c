/* The loop that a C program would run over MPI, time-stamped like every other candidate.
 *
 * Built without linking an MPI library: the one that the process was started with (MPICH or Intel MPI, which
 * share one binary interface) is already loaded and provides the symbols.
 */
#include <mpi.h>
#include <stdint.h>
#include <time.h>

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void ping_pong(int rank, float *buffer, int count) {
  if (rank == 0) {
    MPI_Send(buffer, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD);
    MPI_Recv(buffer, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  } else if (rank == 1) {
    MPI_Recv(buffer, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    MPI_Send(buffer, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
  }
}

/* `count` is the number of floats of the whole message; the rooms for in and out are of that size at most. */
void mpi_loop(const char *operation, float *in, float *out, int count, int64_t *stamps, int calls) {
  int rank, size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int part = count / size;
  stamps[0] = now();
  for (int i = 1; i <= calls; i++) {
    switch (operation[0]) {
      case 'r': /* all_reduce */
        MPI_Allreduce(MPI_IN_PLACE, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
      case 'b': /* broadcast */
        MPI_Bcast(out, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
        break;
      case 'g': /* all_gather */
        MPI_Allgather(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
        break;
      case 's': /* reduce_scatter */
        MPI_Reduce_scatter_block(in, out, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        break;
      case 'a': /* all_to_all */
        MPI_Alltoall(in, part, MPI_FLOAT, out, part, MPI_FLOAT, MPI_COMM_WORLD);
        break;
      default: /* send and receive back */
        ping_pong(rank, out, count);
    }
    stamps[i] = now();
  }
}
