// section constructors; needs simd_fiber; tokens zk_entry
// The scope of a constructor, as its last argument, so that what comes before its body is within it,
// too. An argument may live longer than the call: the body's end leaves the scope.
struct zk_entry : zk_scope {
  zk_entry(zk_site site) : zk_scope(site) {}
};
struct zk_leaving {
  zk_entry& entry;
  ~zk_leaving() { entry.group->level = entry.level.outer; }
};
