// section handed; needs simd_fiber; tokens zk_call zk_hand zk_hand_on zk_without_site
// Functions at which threads meet, as values. They have one parameter more than the kernel's author
// wrote, the line of their call, which a pointer to them must not show.

// R(A...) of the function type R(A..., zk_site), or of a pointer to it.
template <typename Done, typename... Rest>
struct zk_without_site_type;
template <typename R, typename... A, typename Site>
struct zk_without_site_type<R(A...), Site> {
  using type = R(A...);
};
template <typename R, typename... A, typename B, typename C, typename... Rest>
struct zk_without_site_type<R(A...), B, C, Rest...> : zk_without_site_type<R(A..., B), C, Rest...> {};
template <typename R, typename... A>
struct zk_without_site_type<R(A...)> : zk_without_site_type<R(), A...> {};
template <typename F>
struct zk_without_site_type<F*> {
  using type = typename zk_without_site_type<F>::type*;
};
template <typename F>
using zk_without_site = typename zk_without_site_type<F>::type;

// A function of the type that its author wrote.
template <auto function, typename Own>
struct zk_thunk;
template <auto function, typename R, typename... A>
struct zk_thunk<function, R (*)(A...)> {
  static R call(A... arguments) {
    return function(static_cast<A&&>(arguments)..., zk_site(0));
  }
};
template <auto function>
inline constexpr auto zk_hand = &zk_thunk<function, zk_without_site<decltype(function)>>::call;

// Several functions of a name: one is chosen where it is called, or where the type is known.
template <typename F>
struct zk_handed {
  template <typename R, typename... A>
  using pointer = R (*)(A...);
  template <typename... A>
  constexpr decltype(auto) operator()(A&&... arguments) const {
    return F()(static_cast<A&&>(arguments)...);
  }
  template <typename R, typename... A>
  static R call(A... arguments) {
    return F()(static_cast<A&&>(arguments)...);
  }
  template <typename R, typename... A>
    requires requires(A (&... make)()) { F()(make()...); }
  constexpr operator pointer<R, A...>() const {
    return &call<R, A...>;
  }
};
template <typename F>
constexpr zk_handed<F> zk_hand_on(F) {
  return {};
}

// A call through a variable, which does not know who calls.
template <typename R, typename... A>
struct zk_caller_of_pointer {
  zk_site site;
  R (*function)(A...);
  R operator()(A... arguments) const {
    zk_scope within(site);
    return function(static_cast<A&&>(arguments)...);
  }
};
template <typename R, typename... A>
zk_caller_of_pointer<R, A...> zk_call(zk_site site, R (*function)(A...)) {
  return {site, function};
}
template <typename F>
struct zk_caller {
  zk_site site;
  F&& function;
  template <typename... A>
  decltype(auto) operator()(A&&... arguments) const {
    zk_scope within(site);
    return static_cast<F&&>(function)(static_cast<A&&>(arguments)...);
  }
};
template <typename F>
zk_caller<F> zk_call(zk_site site, F&& function) {
  return {site, static_cast<F&&>(function)};
}
