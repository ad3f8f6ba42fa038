# Functions for the native parts of packages: warnings and flags, one object library per instruction set, a pybind11 module.

include(CheckCXXCompilerFlag)

# The options of every native file. Contraction is off: a product that feeds a sum is rounded, as in torch, unless the source asks
# for a fused multiply-add.
function(fusewright_compile_options target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_compile_options(${target} PRIVATE -O3 -fno-math-errno -ffp-contract=off -Wall -Wextra -Wno-psabi)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC bug 105593: its AVX-512 intrinsics use undefined registers on purpose, and warn.
    target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized -Wno-uninitialized)
  endif()
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden
                        VISIBILITY_INLINES_HIDDEN ON CXX_EXTENSIONS OFF)
endfunction()

# Sets `result` to whether the compiler accepts all these flags.
function(fusewright_compiler_takes result)
  string(JOIN " " flags ${ARGN})
  string(MAKE_C_IDENTIFIER "fusewright_takes_${flags}" name)
  check_cxx_compiler_flag("${flags}" ${name})
  set(${result} ${${name}} PARENT_SCOPE)
endfunction()

# fusewright_add_isa(<target> <name> SOURCES <file>... [FLAGS <flag>...] [DEFINITIONS <definition>...] [PROVIDES <definition>])
#
# Compiles the sources for one instruction set and links them into <target>; the definition PROVIDES tells its other files. If the
# compiler does not accept the flags, the set is left out with a message.
function(fusewright_add_isa target name)
  cmake_parse_arguments(ISA "" "PROVIDES" "SOURCES;FLAGS;DEFINITIONS" ${ARGN})
  if(ISA_FLAGS)
    fusewright_compiler_takes(takes ${ISA_FLAGS})
    if(NOT takes)
      message(STATUS "${target}: no ${name}, the compiler does not take ${ISA_FLAGS}")
      return()
    endif()
  endif()
  add_library(${target}_${name} OBJECT ${ISA_SOURCES})
  fusewright_compile_options(${target}_${name})
  target_compile_options(${target}_${name} PRIVATE ${ISA_FLAGS})
  target_compile_definitions(${target}_${name} PRIVATE ${ISA_DEFINITIONS})
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_${name}>)
  if(ISA_PROVIDES)
    target_compile_definitions(${target} PRIVATE ${ISA_PROVIDES})
  endif()
endfunction()

# fusewright_add_extension(<target> DESTINATION <package> SOURCES <file>...)
#
# Adds a pybind11 module to the package. It links neither torch nor an OpenMP library.
function(fusewright_add_extension target)
  cmake_parse_arguments(EXTENSION "" "DESTINATION" "SOURCES" ${ARGN})
  pybind11_add_module(${target} MODULE NO_EXTRAS ${EXTENSION_SOURCES})
  fusewright_compile_options(${target})
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    target_link_options(${target} PRIVATE -Wl,--exclude-libs,ALL -static-libstdc++ -static-libgcc)
  endif()
  install(TARGETS ${target} DESTINATION ${EXTENSION_DESTINATION})
endfunction()
