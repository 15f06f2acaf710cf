// section member_alignment; needs base; tokens zk_member_alignment
// Where Metal places a member of type T: see member_alignment.cc.

namespace metal {

template <class T>
inline constexpr unsigned zk_member_alignment = alignof(T);
template <class T>
inline constexpr unsigned zk_member_alignment<const T> = zk_member_alignment<T>;
template <class T, size_t N>
inline constexpr unsigned zk_member_alignment<T[N]> = zk_member_alignment<T>;
template <class T, size_t N>
inline constexpr unsigned zk_member_alignment<const T[N]> = zk_member_alignment<T>;

}  // namespace metal
