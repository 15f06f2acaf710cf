// section fiber; needs abi
// What the fiber runtime (runtime.cc) and the collectives of a kernel object share.

struct zk_group;

// Runs once for the lanes of a simdgroup that met. `cells` is the cell of lane 0, `active` the
// lanes that take part.
typedef void (*zk_operation)(char* cells, unsigned active);

enum { zk_cell_bytes = 64, zk_simd_width = 32, zk_most_threads = 1024, zk_most_declarations = 64 };

// All stacks of a worker lie in one region that is aligned to its size and begins with the
// zk_group: any address on a stack leads to it, without thread-local storage.
enum : unsigned long long { zk_region_bytes = 256ull << 20 };

// One level of a thread's position in the program: a call of a helper that holds a collective, or
// a turn of a loop that does. Levels form a list from the innermost outwards; `path` is a hash of
// the whole list, so that equal positions compare at once.
struct zk_level {
  zk_level* outer;
  unsigned site;
  unsigned turn;
  unsigned long long path;
};

struct zk_group {
  // A running thread calls these; they return when it may go on.
  void (*meet)(zk_group*, unsigned site, zk_operation);
  void (*barrier)(zk_group*, unsigned site);
  void (*overflow)(zk_group*);  // this one never returns: the stack is too small
  // Of the running thread:
  char* cell;       // operands and results, zk_cell_bytes
  zk_level* level;  // innermost, or null
  unsigned index;   // of the thread in the group
  // Of the group:
  unsigned threads;
  unsigned extent[3];    // threads per dimension, smaller in edge groups
  unsigned position[3];  // in the grid of groups
  char* memory[zk_most_declarations];  // where each threadgroup declaration lies
};

// What a kernel object tells of itself.
struct zk_cooperative {
  // Runs one thread, whose stack ends at `floor`.
  void (*run_thread)(const zk_launch*, zk_group*, const char* floor);
  const unsigned* bytes;  // of each threadgroup declaration
  unsigned declarations;
  const int* sites;  // pairs: site, line of the source (negative: of the header)
  unsigned site_count;
};

struct zk_runtime {
  void (*run)(const zk_launch*, zk_worker*, unsigned long long begin, unsigned long long end,
              const zk_cooperative*);
};
