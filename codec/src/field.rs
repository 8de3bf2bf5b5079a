//! GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11D), the field of `reed-solomon-erasure` and ISA-L.

/// Product of two field elements, by shift and reduce: the definition that every table follows from.
pub const fn mul(a: u8, b: u8) -> u8 {
    let (mut a, mut b, mut product) = (a as u16, b, 0u16);
    while b > 0 {
        if b & 1 == 1 {
            product ^= a;
        }
        a <<= 1;
        if a & 0x100 != 0 {
            a ^= 0x11D;
        }
        b >>= 1;
    }
    product as u8
}

const fn mul_table() -> [[u8; 256]; 256] {
    // Rows by doubling: c*x for every x, from the eight products with powers of two.
    let mut table = [[0u8; 256]; 256];
    let mut c = 0;
    while c < 256 {
        let mut bit = 0;
        while bit < 8 {
            let high = 1usize << bit;
            let product = mul(c as u8, high as u8);
            let mut x = 0;
            while x < high {
                table[c][high + x] = table[c][x] ^ product;
                x += 1;
            }
            bit += 1;
        }
        c += 1;
    }
    table
}

/// `MUL[c][x]` is c*x.
pub static MUL: [[u8; 256]; 256] = mul_table();

/// Bit matrix of `x -> c*x` as the GFNI instruction takes it: the byte 7 - i holds the row that makes bit i, and
/// column b of that row is bit i of c times the element with only bit b.
#[cfg(target_arch = "x86_64")]
const fn bit_matrix(c: u8) -> u64 {
    let mut matrix = 0u64;
    let mut column = 0;
    while column < 8 {
        let product = mul(c, 1 << column);
        let mut bit = 0;
        while bit < 8 {
            let set = ((product >> bit) & 1) as u64;
            matrix |= set << (8 * (7 - bit) + column);
            bit += 1;
        }
        column += 1;
    }
    matrix
}

/// `BIT_MATRICES[c]` multiplies by c.
#[cfg(target_arch = "x86_64")]
pub static BIT_MATRICES: [u64; 256] = {
    let mut matrices = [0; 256];
    let mut c = 0;
    while c < 256 {
        matrices[c] = bit_matrix(c as u8);
        c += 1;
    }
    matrices
};

/// `NIBBLES[c]` are the products of c with every low half and with every high half of a byte.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub static NIBBLES: [[[u8; 16]; 2]; 256] = {
    let table = mul_table();
    let mut nibbles = [[[0; 16]; 2]; 256];
    let mut c = 0;
    while c < 256 {
        let mut half = 0;
        while half < 16 {
            nibbles[c][0][half] = table[c][half];
            nibbles[c][1][half] = table[c][half << 4];
            half += 1;
        }
        c += 1;
    }
    nibbles
};

/// The inverse of a non-zero element; 0 for 0.
pub fn inverse(a: u8) -> u8 {
    (1..=255u8)
        .find(|x| MUL[usize::from(a)][usize::from(*x)] == 1)
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_the_definition() {
        for c in 0..=255u8 {
            for x in 0..=255u8 {
                assert_eq!(MUL[usize::from(c)][usize::from(x)], mul(c, x));
            }
        }
    }

    #[test]
    fn every_non_zero_element_has_an_inverse() {
        assert!((1..=255u8).all(|a| mul(a, inverse(a)) == 1));
    }
}
