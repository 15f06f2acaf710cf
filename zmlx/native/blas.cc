// MLX's matrix products on OpenBLAS.
//
// MLX's Linux wheel is linked to the reference BLAS, some thirty times slower. Its three products
// are imported functions, so one address each in libmlx's own import table decides which library
// runs. Rewriting those addresses works whatever was imported or called before.
#include <dlfcn.h>

#include <stdexcept>
#include <vector>

#include "host.h"

#if defined(__linux__)
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#endif

namespace zmlx {
namespace {

constexpr const char* products[] = {"cblas_sgemm", "cblas_dgemm", "cblas_cgemm"};
std::atomic<bool> routed{false};

#if defined(__linux__)

// Where libmlx keeps the address of an imported function. There may be two: one for calls and one
// for pointers taken.
struct Slot {
  const char* name;
  void** address;
};

bool holds_address(uint64_t info) {
#if defined(__x86_64__)
  return ELF64_R_TYPE(info) == R_X86_64_JUMP_SLOT || ELF64_R_TYPE(info) == R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
  return ELF64_R_TYPE(info) == R_AARCH64_JUMP_SLOT || ELF64_R_TYPE(info) == R_AARCH64_GLOB_DAT;
#else
  return false;
#endif
}

int collect_slots(dl_phdr_info* object, size_t, void* result) {
  const char* name = std::strrchr(object->dlpi_name, '/');
  if (std::strcmp(name ? name + 1 : object->dlpi_name, "libmlx.so") != 0) return 0;
  const ElfW(Dyn)* dynamic = nullptr;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    if (object->dlpi_phdr[i].p_type == PT_DYNAMIC) {
      dynamic = reinterpret_cast<ElfW(Dyn)*>(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
    }
  }
  const ElfW(Sym)* symbols = nullptr;
  const char* strings = nullptr;
  struct Table {
    const ElfW(Rela)* begin = nullptr;
    size_t bytes = 0;
  } calls, data;
  for (; dynamic && dynamic->d_tag != DT_NULL; ++dynamic) {
    auto pointer = dynamic->d_un.d_ptr;
    switch (dynamic->d_tag) {
      case DT_SYMTAB:
        symbols = reinterpret_cast<const ElfW(Sym)*>(pointer);
        break;
      case DT_STRTAB:
        strings = reinterpret_cast<const char*>(pointer);
        break;
      case DT_JMPREL:
        calls.begin = reinterpret_cast<const ElfW(Rela)*>(pointer);
        break;
      case DT_PLTRELSZ:
        calls.bytes = pointer;
        break;
      case DT_RELA:
        data.begin = reinterpret_cast<const ElfW(Rela)*>(pointer);
        break;
      case DT_RELASZ:
        data.bytes = pointer;
        break;
    }
  }
  if (!symbols || !strings) return 0;
  auto& slots = *static_cast<std::vector<Slot>*>(result);
  for (const Table& table : {calls, data}) {
    for (size_t i = 0; table.begin && i < table.bytes / sizeof(ElfW(Rela)); ++i) {
      const ElfW(Rela)& entry = table.begin[i];
      if (!holds_address(entry.r_info)) continue;
      const char* symbol = strings + symbols[ELF64_R_SYM(entry.r_info)].st_name;
      for (const char* product : products) {
        if (std::strcmp(symbol, product) == 0) {
          slots.push_back({product, reinterpret_cast<void**>(object->dlpi_addr + entry.r_offset)});
        }
      }
    }
  }
  return 1;  // found: look no further
}

void store(const Slot& slot, void* function) {
  // A libmlx linked with full RELRO has its table read-only after loading.
  auto size = uintptr_t(sysconf(_SC_PAGESIZE));
  auto page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot.address) & ~(size - 1));
  if (mprotect(page, size, PROT_READ | PROT_WRITE) != 0) {
    throw std::runtime_error(
        std::string("[use_openblas] libmlx's import table cannot be written: ") +
        std::strerror(errno));
  }
  __atomic_store_n(slot.address, function, __ATOMIC_RELEASE);
}

#endif

}  // namespace

int route_blas(const std::string& library, const std::string& prefix, int threads) {
#if defined(__linux__)
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    throw std::runtime_error(std::string("[use_openblas] OpenBLAS does not load: ") + dlerror());
  }
  auto find = [&](const std::string& name) {
    void* function = dlsym(handle, (prefix + name).c_str());
    if (!function) {
      throw std::runtime_error("[use_openblas] " + library + " has no " + prefix + name + ".");
    }
    return function;
  };
  std::vector<Slot> slots;
  dl_iterate_phdr(collect_slots, &slots);
  // Everything is looked up before anything is changed.
  std::vector<void*> functions;
  for (const char* product : products) {
    bool imported = false;
    for (auto& slot : slots) imported = imported || slot.name == product;
    if (!imported) {
      throw std::runtime_error(std::string("[use_openblas] This MLX does not import ") + product +
                               ": it has a BLAS of its own.");
    }
  }
  for (auto& slot : slots) functions.push_back(find(slot.name));
  auto set_count = reinterpret_cast<void (*)(int)>(find("openblas_set_num_threads"));
  for (size_t i = 0; i < slots.size(); ++i) store(slots[i], functions[i]);
  set_count(threads);
  routed.store(true);
  return int(std::size(products));
#else
  throw std::runtime_error("[use_openblas] Only MLX on Linux needs this, and only there it works.");
#endif
}

bool blas_routed() { return routed.load(); }

}  // namespace zmlx
